"""Sizes of a decoder most of whose layers have a gated delta network, and the rules."""

from collections.abc import Iterator
from typing import Self

from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.family import Positive
from jaxpipe.model.recurrent.case import unmet_by_recurrence
from jaxpipe.model.recurrent.config import LINEAR, HybridConfig


def broken_by_chunk(tokens: int) -> Iterator[str]:
    """Yield a sentence if `model.delta_chunk` is no power of two."""
    if tokens & (tokens - 1):
        yield (
            f"model.delta_chunk={tokens} must be a power of two: the tokens of a chunk are halved "
            f"again and again; set model.delta_chunk=64."
        )


class DeltaConfig(HybridConfig, LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder most of whose layers have a gated delta network."""

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

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> DeltaConfig(**sizes, n_layers=3, n_experts=16, attention_every=3).layer_kinds
        ('linear_sparse', 'linear_sparse', 'sparse')
        """
        return tuple(
            LINEAR + kind if (i + 1) % self.attention_every else kind
            for i, kind in enumerate(super().layer_kinds)
        )

    @property
    def delta_widths(self) -> tuple[int, int]:
        """Widths of all keys, and of all values, of a gated delta network."""
        keys = self.delta_key_heads * self.delta_key_dim
        return keys, self.delta_value_heads * self.delta_value_dim

    @property
    def recurrent_matrices(self) -> int:
        """Number of parameters in the matrices of a gated delta network."""
        keys, values = self.delta_widths
        return self.d_model * (2 * keys + 3 * values + 2 * self.delta_value_heads)

    @property
    def recurrent_vectors(self) -> int:
        """Number of parameters in its convolutions, decays and norm."""
        keys, values = self.delta_widths
        decays = 2 * self.delta_value_heads
        return self.delta_taps * (2 * keys + values) + decays + self.delta_value_dim

    @property
    def recurrent_flops(self) -> int:
        """18 H K V per token: a head's state `[K, V]` has three products.

        It multiplies a key and a query, and a key and a correction make its change.
        """
        return 18 * self.delta_value_heads * self.delta_key_dim * self.delta_value_dim

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
