"""How the layers of one family of decoders differ from Llama's, by the architecture alone."""

from typing import Literal, NamedTuple

Gate = Literal["silu", "gelu_tanh", "clamped", "limited", "relu2"]


class Variant(NamedTuple):
    """The choices of an architecture that no setting changes; the defaults are Llama's.

    Attributes:
      gate: gate of MLPs and experts (`jaxpipe.model.layers.gated`).
      norm_offset: what norms add to their stored scale.
      has_pre_norms: whether what attention and MLP read has a norm.
      has_post_norms: whether what attention and MLP return has a norm.
      norms_span_heads: whether the norms of queries and keys are over all heads together.
      rotates_neighbours: whether the pairs of dims that rotate are (2i, 2i + 1), and not (i, i + K
        / 2) of the rotated dims K.
      scales_windows: whether the wavelengths of layers with a window are scaled as the others are.
      scales_embedding: whether embeddings are multiplied by sqrt(d_model).
      has_sinks: whether each head attends to one more key, of learned score and value 0.
      has_out_bias: whether attention's last product has a bias.
      has_output_gate: whether the sigmoid of a product of attention's input multiplies its output.
      has_expert_biases: whether the router and the experts' products have biases.
      has_shared_gate: whether a sigmoid of their input multiplies what the shared experts return.
      weighs_inputs: whether the router's weights multiply the experts' inputs, not their outputs.
    """

    gate: Gate = "silu"
    norm_offset: float = 0.0
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norms_span_heads: bool = False
    rotates_neighbours: bool = False
    scales_windows: bool = True
    scales_embedding: bool = False
    has_sinks: bool = False
    has_out_bias: bool = False
    has_output_gate: bool = False
    has_expert_biases: bool = False
    has_shared_gate: bool = False
    weighs_inputs: bool = False


LLAMA = Variant()
