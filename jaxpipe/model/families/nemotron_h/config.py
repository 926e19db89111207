"""Sizes and choices of a Nemotron-H, the rules between them, and the published models."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import fields, replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import ModelFamily, Positive
from jaxpipe.model.layers.moe.config import SPARSE, NotNegative
from jaxpipe.model.recurrent.case import unmet_by_recurrence
from jaxpipe.model.variant import Variant

MAMBA, ATTENTION, MLP = "mamba", "attention", "mlp"  # the layer kinds, with `SPARSE`
KINDS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": SPARSE}  # by letter of a pattern
Pattern = Annotated[str, Meta(pattern=r"^[M*E-]+$")]
# Settings of Llama that no layer here reads: attention has no positions and no window, and the
# pattern says which layers have experts.
_UNREAD = "global_every", "rotary_share", "sliding_window", "first_dense_layers", "moe_every"


class NemotronHConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Nemotron-H, by preset or by size; every layer has one mixer, MLP or mixture."""

    family: str = "nemotron_h"
    # a letter for each layer: M Mamba-2, * attention without positions, - MLP, E experts; a pattern
    # shorter than n_layers repeats
    layer_pattern: Pattern
    mamba_heads: Positive = 128  # heads of Mamba-2
    mamba_head_dim: Positive = 64  # width of its heads
    mamba_groups: Positive = 8  # groups of its heads, each with keys, queries and a norm of its own
    mamba_state: Positive = 128  # width of its keys and queries
    mamba_taps: Positive = 4  # tokens that its convolutions read, the current one included
    # tokens that it computes by dense products at once; results depend on it by rounding alone
    mamba_chunk: Positive = 128
    mamba_step_min: NotNegative = 0.001  # least step of a token: smaller ones are raised to it

    VARIANT: ClassVar[Variant] = Variant(gate="relu2")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> NemotronHConfig(**sizes, n_layers=3, layer_pattern="M-").layer_kinds
        ('mamba', 'mlp', 'mamba')
        """
        pattern = self.layer_pattern
        return tuple(KINDS[pattern[i % len(pattern)]] for i in range(self.n_layers))

    def resolved(self) -> Self:
        """The same model with every derived size filled in, and a letter for every layer."""
        pattern = self.layer_pattern * -(-self.n_layers // len(self.layer_pattern))
        return replace(super().resolved(), layer_pattern=pattern[: self.n_layers])

    @property
    def has_positions(self) -> bool:
        """Whether attention rotates queries and keys."""
        return False

    @property
    def mamba_widths(self) -> tuple[int, int]:
        """Widths of all heads, and of the keys of all groups, of Mamba-2."""
        return self.mamba_heads * self.mamba_head_dim, self.mamba_groups * self.mamba_state

    def _matrices(self, experts: int) -> int:
        """Number of parameters in the matrices of layers."""
        d, (inner, states) = self.d_model, self.mamba_widths
        of_kind = {
            MAMBA: d * (3 * inner + 2 * states + self.mamba_heads),
            ATTENTION: 2 * d * self.head_size * (self.n_heads + self.n_kv_heads),
            MLP: 2 * d * self.d_ff,
            SPARSE: d * (2 * self.expert_width * (experts + self.shared_experts) + self.n_experts),
        }
        return sum(of_kind[kind] for kind in self.layer_kinds)

    @property
    def _vectors(self) -> int:
        """Number of parameters in norms, and in convolutions, biases, decays and skips."""
        inner, states = self.mamba_widths
        of_mamba = (self.mamba_taps + 1) * (inner + 2 * states) + 3 * self.mamba_heads + inner
        return self.layer_kinds.count(MAMBA) * of_mamba + (self.n_layers + 1) * self.d_model

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter, 12 H K S per layer of attention, and 12 H N P per Mamba-2.

        A head's state `[N, P]` takes a key times an input up, and multiplies a query. The embedding
        look-up is free, and of routed experts only those a token chooses count.
        """
        experts = self.experts_per_token if self.n_experts else 0
        matrices = self._matrices(experts) + self.vocab_size * self.d_model
        keys = 12 * self.n_heads * self.head_size * seq_len
        state = 12 * self.mamba_widths[0] * self.mamba_state
        kinds = self.layer_kinds
        return 6 * matrices + kinds.count(ATTENTION) * keys + kinds.count(MAMBA) * state

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            super().part(tp),
            mamba_heads=self.mamba_heads // tp,
            mamba_groups=self.mamba_groups // tp,
        )

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them."""
        inner, states = self.mamba_widths
        return super().product_sizes(tp) | {
            "model.mamba_heads / parallel.tp x model.mamba_head_dim": inner // tp,
            "model.mamba_groups / parallel.tp x model.mamba_state": states // tp,
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

        `model.mamba_groups` must be a multiple of `parallel.tp`.

        `model.mamba_heads` must be a multiple of `model.mamba_groups`.

        `model.layer_pattern` must have a layer E among the `model.n_layers` if `model.n_experts`
        is above 0, and none else.

        `model.sliding_window` and the settings of positions must be left out in models with a
        `model.layer_pattern`, and so must `model.first_dense_layers` and `model.moe_every`.
        """
        if bool(self.n_experts) != (SPARSE in self.layer_kinds):
            yield (
                f"model.n_experts={self.n_experts}, but with model.layer_pattern="
                f"{self.layer_pattern!r} {self.layer_kinds.count(SPARSE)} of {self.n_layers} "
                f"layers are E, those with experts: change one of them."
            )
        else:
            yield from super().broken_rules(tp)
        if self.mamba_groups % tp:
            yield (
                f"model.mamba_groups={self.mamba_groups} must be a multiple of parallel.tp={tp}: "
                f"devices that share a layer have whole groups of heads; lower parallel.tp."
            )
        if self.mamba_heads % self.mamba_groups:
            yield (
                f"model.mamba_heads={self.mamba_heads} must be a multiple of model.mamba_groups="
                f"{self.mamba_groups}: heads share keys and queries in equal groups; change one."
            )
        yield from self._without_effect()

    def _without_effect(self) -> Iterator[str]:
        """Yield a sentence for every setting of Llama that no layer reads."""
        for field in fields(LlamaConfig):
            is_unread = field.name.startswith("rope_") or field.name in _UNREAD
            if is_unread and (value := getattr(self, field.name)) != field.default:
                yield (
                    f"model.{field.name}={value!r} has no effect in models of the family "
                    f"{self.family!r}: leave it out."
                )


_8B = decoder_sizes(52, 4096, 32, 8, 21504) | {
    "layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "head_dim": 128,
    "vocab_size": 131072, "max_seq_len": 8192,
}  # fmt: skip
_30B = decoder_sizes(52, 2688, 32, 2, 1856) | {
    "layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128,
    "vocab_size": 131072, "max_seq_len": 262144, "mamba_heads": 64, "n_experts": 128,
    "experts_per_token": 6, "d_expert": 1856, "shared_experts": 2, "router_score": "sigmoid",
    "router_bias": True, "router_scale": 2.5,
}  # fmt: skip

PRESETS: dict[str, Preset] = {"nemotron_h_8b": _8B, "nemotron_3_nano_30b_a3b": _30B}
NEMOTRON_H = ModelFamily(
    "nemotron_h",
    NemotronHConfig,
    PRESETS,
    model="jaxpipe.model.families.nemotron_h.decoder:NemotronHDecoder",
    huggingface="jaxpipe.model.families.nemotron_h.huggingface",
)
