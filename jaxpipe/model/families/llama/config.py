"""Sizes and choices of a Llama-style decoder, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.family import Count, Positive
from jaxpipe.model.layers.rope.config import RotaryConfig

Share = Annotated[float, Meta(gt=0, le=1)]
LOCAL = "local_"  # prefix of the kinds of layers that attend within the window, if others do not


class LlamaConfig(RotaryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Llama-style decoder, with experts or without, by preset or by size."""

    n_kv_heads: Positive  # number of key/value heads; divides n_heads
    sliding_window: Count = 0  # last tokens that a query attends to, itself included; 0: all
    # with a window, one layer in this many attends to all tokens instead; 0: no layer does
    global_every: Count = 0
    qkv_bias: bool = False  # biases on queries, keys and values (Qwen2.5)
    qk_norm: bool = False  # RMSNorm on queries and keys, of each head (Qwen3) or all together
    rotary_share: Share = 1.0  # share of a head's dims, from the first, that positions rotate
    tie_embeddings: bool = False  # the head is the transposed embedding

    @property
    def query_factor(self) -> float:
        """Factor on queries, besides the 1 / sqrt(head_dim) on scores."""
        return 1.0

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer; where some layers attend to all tokens, the others are local.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> LlamaConfig(**sizes, n_layers=3, sliding_window=2, global_every=3).layer_kinds
        ('local_layer', 'local_layer', 'layer')
        """
        every = self.global_every if self.sliding_window else 0
        return tuple(
            LOCAL + kind if every and (i + 1) % every else kind
            for i, kind in enumerate(super().layer_kinds)
        )

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: their own window and wavelengths."""
        if self.global_every and not kind.startswith(LOCAL):
            return replace(self, sliding_window=0)
        if self.VARIANT.scales_windows or not self.sliding_window:
            return self
        return replace(self, rope_scaling="linear", rope_factor=1.0)

    @property
    def rotary_size(self) -> int:
        """Number of a head's dims that rotate."""
        return int(self.head_size * self.rotary_share)

    @property
    def key_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_heads

    @property
    def tied(self) -> bool:
        """Whether the head is the transposed embedding."""
        return self.tie_embeddings

    @property
    def window(self) -> int:
        """Number of last tokens that a query attends to, itself included; 0: all."""
        return self.sliding_window

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        embed_head = self.vocab_size * self.d_model * (1 if self.tied else 2)
        return self._matrices(experts) + self._vectors + self.mlp_vectors(experts) + embed_head

    def _matrices(self, experts: int) -> int:
        """Number of parameters in the matrices of layers."""
        return self.mixer_matrices + self.mlp_parameters(experts)

    @property
    def mixer_matrices(self) -> int:
        """Number of parameters in the matrices of attention."""
        heads = (2 + self.VARIANT.has_output_gate) * self.n_heads + 2 * self.n_kv_heads
        return self.blocks * self.d_model * self.head_size * heads

    @property
    def _vectors(self) -> int:
        """Number of parameters in norms, and in the vectors of attention."""
        norms = 2 * (self.VARIANT.has_pre_norms + self.VARIANT.has_post_norms)
        return self.mixer_vectors + (self.blocks * norms + 1) * self.d_model

    @property
    def mixer_vectors(self) -> int:
        """Number of parameters in norms of heads, in sinks, and in the biases of attention."""
        d, k, variant = self.d_model, self.head_size, self.VARIANT
        normed = self.n_heads + self.n_kv_heads if variant.norms_span_heads else 2
        attention = k * normed * self.qk_norm
        attention += k * (self.n_heads + 2 * self.n_kv_heads) * self.qkv_bias
        attention += self.n_heads * variant.has_sinks + d * variant.has_out_bias
        return self.blocks * attention

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter and 12 H K S per layer, with S at most the layer's window.

        The embedding look-up is free, and of routed experts only those a token chooses count.
        """
        experts = self.experts_per_token if self.n_experts else 0
        matrices = self._matrices(experts) + self.vocab_size * self.d_model
        windows = (self.of_kind(kind).sliding_window for kind in self.block_kinds)
        keys = sum(min(seq_len, window or seq_len) for window in windows)
        return 6 * matrices + 12 * self.n_heads * self.head_size * keys

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            self.resolved(),
            n_heads=self.n_heads // tp,
            n_kv_heads=max(self.n_kv_heads // tp, 1),
            d_ff=self.d_ff // tp,
            d_expert=self.d_expert // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def attention_case(self, case: AttentionCase, tp: int) -> AttentionCase:
        """The case with what attention of this model asks for, on one of `tp` devices."""
        return super().attention_case(case, tp)._replace(has_sinks=self.VARIANT.has_sinks)

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.n_kv_heads` and `parallel.tp`: one must be a multiple of the other.

        `model.n_heads` must be a multiple of `model.n_kv_heads`.

        `model.global_every` needs a `model.sliding_window`.

        `model.qk_norm` over all heads together needs `model.n_kv_heads` that are a multiple of
        `parallel.tp`.
        """
        yield from self.unequal_parts(tp)
        yield from self.broken_mixture_rules(tp)
        if self.n_kv_heads % tp and tp % self.n_kv_heads:
            yield (
                f"model.n_kv_heads={self.n_kv_heads} and parallel.tp={tp}: one must be a multiple "
                f"of the other, so that each device has whole key/value heads, or a copy of one."
            )
        elif self.n_kv_heads % tp and self.qk_norm and self.VARIANT.norms_span_heads:
            yield (
                f"model.n_kv_heads={self.n_kv_heads} must be a multiple of parallel.tp={tp} in "
                f"models of the family {self.family!r}, whose norms of keys are over all heads: "
                f"lower parallel.tp."
            )
        if self.n_heads % self.n_kv_heads:
            yield (
                f"model.n_heads={self.n_heads} must be a multiple of model.n_kv_heads="
                f"{self.n_kv_heads}: query heads share key/value heads in equal groups."
            )
        if self.global_every and not self.sliding_window:
            yield (
                f"model.global_every={self.global_every} chooses layers without the window, but "
                f"model.sliding_window=0 is none: give a window, or leave it out."
            )
        yield from self.broken_rotary_rules()
