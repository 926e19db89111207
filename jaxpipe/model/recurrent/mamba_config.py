"""Sizes of a decoder some of whose layers have Mamba-2, and the rules."""

from collections.abc import Iterator
from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.family import Positive
from jaxpipe.model.layers.moe.config import NotNegative
from jaxpipe.model.recurrent.case import unmet_by_recurrence
from jaxpipe.model.recurrent.config import LINEAR, HybridConfig


class MambaConfig(HybridConfig, LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder some of whose layers have Mamba-2 in the place of attention."""

    # a letter for each layer: M Mamba-2, * attention; a pattern shorter than n_layers repeats
    layer_pattern: Annotated[str, Meta(pattern=r"^[M*]+$")]
    mamba_heads: Positive = 128  # heads of Mamba-2
    mamba_head_dim: Positive = 64  # width of its heads
    mamba_groups: Positive = 1  # groups of its heads, each with keys, queries and a norm of its own
    mamba_state: Positive = 128  # width of its keys and queries
    mamba_taps: Positive = 4  # tokens that its convolutions read, the current one included
    # tokens that it computes by dense products at once; results depend on it by rounding alone
    mamba_chunk: Positive = 128
    mamba_step_min: NotNegative = 0.0  # least step of a token: smaller ones are raised to it

    @property
    def letters(self) -> str:
        """The letter of every layer."""
        pattern = self.layer_pattern
        return "".join(pattern[i % len(pattern)] for i in range(self.n_layers))

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> MambaConfig(**sizes, n_layers=3, layer_pattern="M*").layer_kinds
        ('linear_layer', 'layer', 'linear_layer')
        """
        kinds = zip(self.letters, super().layer_kinds)
        return tuple(LINEAR + kind if letter == "M" else kind for letter, kind in kinds)

    def resolved(self) -> Self:
        """The same model with every derived size filled in, and a letter for every layer."""
        return replace(super().resolved(), layer_pattern=self.letters)

    @property
    def mamba_widths(self) -> tuple[int, int]:
        """Widths of all heads, and of the keys of all groups, of Mamba-2."""
        return self.mamba_heads * self.mamba_head_dim, self.mamba_groups * self.mamba_state

    @property
    def recurrent_matrices(self) -> int:
        """Number of parameters in the matrices of a Mamba-2."""
        inner, states = self.mamba_widths
        return self.d_model * (3 * inner + 2 * states + self.mamba_heads)

    @property
    def recurrent_vectors(self) -> int:
        """Number of parameters in its convolutions, biases, decays, skips and norm."""
        inner, states = self.mamba_widths
        return (self.mamba_taps + 1) * (inner + 2 * states) + 3 * self.mamba_heads + inner

    @property
    def recurrent_flops(self) -> int:
        """12 H N P per token: a state `[N, P]` takes a key times an input up, and has a query."""
        return 12 * self.mamba_widths[0] * self.mamba_state

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            super().part(tp),
            mamba_heads=self.mamba_heads // tp,
            mamba_groups=max(self.mamba_groups // tp, 1),
        )

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them."""
        states = max(self.mamba_groups // tp, 1) * self.mamba_state
        return super().product_sizes(tp) | {
            "model.mamba_heads / parallel.tp x model.mamba_head_dim": self.mamba_widths[0] // tp,
            "the width of a device's groups, groups x model.mamba_state,": states,
        }

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why tokens cannot be mixed as the case asks.

        `parallel.cp_method='ring'` excludes models with Mamba-2, and `'ulysses'` needs
        `model.mamba_groups` / `parallel.tp` that are a multiple of `parallel.cp`.
        """
        yield from super().unmet_by_attention(case, tp)
        yield from unmet_by_recurrence(case, "Mamba-2", "model.mamba_groups", self.mamba_groups, tp)

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.mamba_groups` must be 1 or a multiple of `parallel.tp`.

        `model.mamba_heads` must be a multiple of `model.mamba_groups` and of `parallel.tp`.
        """
        yield from super().broken_rules(tp)
        heads, groups = self.mamba_heads, self.mamba_groups
        if groups > 1 and groups % tp:
            yield (
                f"model.mamba_groups={groups} must be a multiple of parallel.tp={tp}: devices that "
                f"share a layer have whole groups of heads, or all share one; lower parallel.tp."
            )
        elif heads % groups or heads % tp:
            yield (
                f"model.mamba_heads={heads} must be a multiple of model.mamba_groups={groups} and "
                f"of parallel.tp={tp}: groups, and devices that share a layer, have equally many "
                f"heads; change one."
            )
