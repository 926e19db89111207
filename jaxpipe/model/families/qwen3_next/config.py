"""Sizes and choices of a Qwen3-Next, the rules between them, and the published models."""

from collections.abc import Iterator
from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.llama.config import LlamaConfig, Share
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.recurrent.case import unmet_by_recurrence
from jaxpipe.model.variant import Variant

LINEAR = "linear_"  # prefix of the kinds of layers that are gated delta networks


def is_linear(kind: str) -> bool:
    """Whether layers of a kind mix tokens by a gated delta network instead of attention."""
    return kind.startswith(LINEAR)


def broken_by_chunk(tokens: int) -> Iterator[str]:
    """Yield a sentence if `model.delta_chunk` is no power of two."""
    if tokens & (tokens - 1):
        yield (
            f"model.delta_chunk={tokens} must be a power of two: the tokens of a chunk are halved "
            f"again and again; set model.delta_chunk=64."
        )


class Qwen3NextConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Qwen3-Next, by preset or by size; most layers have a gated delta network."""

    family: str = "qwen3_next"
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e7
    rotary_share: Share = 0.25
    qk_norm: bool = True
    n_experts: Positive
    experts_per_token: Positive = 10
    shared_experts: Count = 1
    # one layer in this many has attention; the others have a gated delta network
    attention_every: Positive = 4
    delta_key_heads: Positive = 16  # query and key heads of a gated delta network
    delta_value_heads: Positive = 32  # its value heads, a multiple of delta_key_heads
    delta_key_dim: Positive = 128  # width of its queries and keys
    delta_value_dim: Positive = 128  # width of its values
    delta_taps: Positive = 4  # tokens that its convolutions read, the current one included
    # tokens that it computes by dense products at once, a power of two; results depend on it by
    # rounding alone
    delta_chunk: Positive = 64

    VARIANT: ClassVar[Variant] = Variant(
        norm_offset=1.0, has_output_gate=True, has_shared_gate=True
    )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> Qwen3NextConfig(**sizes, n_layers=3, n_experts=16, attention_every=3).layer_kinds
        ('linear_sparse', 'linear_sparse', 'sparse')
        """
        return tuple(
            LINEAR + kind if (i + 1) % self.attention_every else kind
            for i, kind in enumerate(super().layer_kinds)
        )

    @property
    def linear_layers(self) -> int:
        """Number of layers with a gated delta network."""
        return sum(map(is_linear, self.layer_kinds))

    @property
    def delta_widths(self) -> tuple[int, int]:
        """Widths of all keys, and of all values, of a gated delta network."""
        keys = self.delta_key_heads * self.delta_key_dim
        return keys, self.delta_value_heads * self.delta_value_dim

    @property
    def mixer_matrices(self) -> int:
        """Number of parameters in the matrices of attention and of gated delta networks."""
        keys, values = self.delta_widths
        of_linear = self.d_model * (2 * keys + 3 * values + 2 * self.delta_value_heads)
        return self._of_layers(super().mixer_matrices, of_linear)

    @property
    def mixer_vectors(self) -> int:
        """Number of parameters in norms of heads, in convolutions, and in decays."""
        keys, values = self.delta_widths
        of_linear = self.delta_taps * (2 * keys + values)
        of_linear += 2 * self.delta_value_heads + self.delta_value_dim
        return self._of_layers(super().mixer_vectors, of_linear)

    def _of_layers(self, as_attention: int, of_linear: int) -> int:
        """Sum over layers, given that of all layers if they had attention, and a linear layer's."""
        linear = self.linear_layers
        return as_attention // self.n_layers * (self.n_layers - linear) + of_linear * linear

    def flops_per_token(self, seq_len: int) -> int:
        """As of Llama in layers with attention, and 18 H K V in others, for three products.

        A head's state `[K, V]` multiplies a key and a query, and a key and a correction make its
        change.
        """
        keys = 12 * self.n_heads * self.head_size * seq_len
        state = 18 * self.delta_value_heads * self.delta_key_dim * self.delta_value_dim
        return super().flops_per_token(seq_len) + self.linear_layers * (state - keys)

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            super().part(tp),
            delta_key_heads=self.delta_key_heads // tp,
            delta_value_heads=self.delta_value_heads // tp,
        )

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them."""
        keys, values = self.delta_widths
        return super().product_sizes(tp) | {
            "model.delta_key_heads / parallel.tp x model.delta_key_dim": keys // tp,
            "model.delta_value_heads / parallel.tp x model.delta_value_dim": values // tp,
        }

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why tokens cannot be mixed as the case asks.

        `parallel.cp_method='ring'` excludes models with gated delta networks, and `'ulysses'` needs
        `model.delta_key_heads` / `parallel.tp` that are a multiple of `parallel.cp`.
        """
        yield from super().unmet_by_attention(case, tp)
        yield from unmet_by_recurrence(
            case, "a gated delta network", "model.delta_key_heads", self.delta_key_heads, tp
        )

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.delta_key_heads` must be a multiple of `parallel.tp`.

        `model.delta_value_heads` must be a multiple of `model.delta_key_heads`.

        `model.delta_chunk` must be a power of two.

        `model.sliding_window` must be 0 in models with gated delta networks.
        """
        yield from super().broken_rules(tp)
        if self.delta_key_heads % tp:
            yield (
                f"model.delta_key_heads={self.delta_key_heads} must be a multiple of "
                f"parallel.tp={tp}: devices that share a layer have whole heads; change one."
            )
        if self.delta_value_heads % self.delta_key_heads:
            yield (
                f"model.delta_value_heads={self.delta_value_heads} must be a multiple of "
                f"model.delta_key_heads={self.delta_key_heads}: value heads share a key head in "
                f"equal groups; change one."
            )
        yield from broken_by_chunk(self.delta_chunk)
        if self.sliding_window:
            yield (
                f"model.sliding_window={self.sliding_window}: attention has no window in models of "
                f"the family {self.family!r}; leave it out."
            )


_80B = decoder_sizes(48, 2048, 16, 2, 5120) | {
    "head_dim": 256, "vocab_size": 151936, "max_seq_len": 262144, "n_experts": 512,
    "experts_per_token": 10, "d_expert": 512, "shared_experts": 1,
}  # fmt: skip

PRESETS: dict[str, Preset] = {"qwen3_next_80b_a3b": _80B}
QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    Qwen3NextConfig,
    PRESETS,
    model="jaxpipe.model.families.qwen3_next.decoder:HybridDecoder",
    huggingface="jaxpipe.model.families.qwen3_next.huggingface",
)
