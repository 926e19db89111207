"""Sizes and choices of a Nemotron-H, the rules between them, and the published models."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta

from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import ModelFamily, Positive
from jaxpipe.model.layers.moe.config import SPARSE, NotNegative
from jaxpipe.model.recurrent.mamba_config import MambaConfig
from jaxpipe.model.variant import Variant

MAMBA, ATTENTION, MLP = "mamba", "attention", "mlp"  # the layer kinds, with `SPARSE`
KINDS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": SPARSE}  # by letter of a pattern


class NemotronHConfig(MambaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Nemotron-H, by preset or by size; every layer has one mixer, MLP or mixture."""

    family: str = "nemotron_h"
    # a letter for each layer: M Mamba-2, * attention without positions, - MLP, E experts; a pattern
    # shorter than n_layers repeats
    layer_pattern: Annotated[str, Meta(pattern=r"^[M*E-]+$")]
    mamba_groups: Positive = 8
    mamba_step_min: NotNegative = 0.001

    VARIANT: ClassVar[Variant] = Variant(gate="relu2")
    # Attention has no positions and no window, and letters say which layers have experts.
    UNREAD: ClassVar[tuple[str, ...]] = (
        *MambaConfig.UNREAD, "rope_", "rotary_share", "first_dense_layers", "moe_every"
    )  # fmt: skip

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> NemotronHConfig(**sizes, n_layers=3, layer_pattern="M-").layer_kinds
        ('mamba', 'mlp', 'mamba')
        """
        return tuple(KINDS[letter] for letter in self.letters)

    @property
    def has_positions(self) -> bool:
        """Whether attention rotates queries and keys."""
        return False

    def _matrices(self, experts: int) -> int:
        """Number of parameters in the matrices of layers."""
        d = self.d_model
        of_kind = {
            MAMBA: self.recurrent_matrices,
            ATTENTION: 2 * d * self.head_size * (self.n_heads + self.n_kv_heads),
            MLP: 2 * d * self.d_ff,
            SPARSE: d * (2 * self.expert_width * (experts + self.shared_experts) + self.n_experts),
        }
        return sum(of_kind[kind] for kind in self.layer_kinds)

    @property
    def _vectors(self) -> int:
        """Number of parameters in norms, and in convolutions, biases, decays and skips."""
        of_mamba = self.layer_kinds.count(MAMBA) * self.recurrent_vectors
        return of_mamba + (self.n_layers + 1) * self.d_model

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter, 12 H K S per attention, and `recurrent_flops` per Mamba-2.

        The embedding look-up is free, and of routed experts only those a token chooses count.
        """
        experts = self.experts_per_token if self.n_experts else 0
        matrices = self._matrices(experts) + self.vocab_size * self.d_model
        keys, kinds = 12 * self.n_heads * self.head_size * seq_len, self.layer_kinds
        state = kinds.count(MAMBA) * self.recurrent_flops
        return 6 * matrices + kinds.count(ATTENTION) * keys + state

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.layer_pattern` must have a layer E among the `model.n_layers` if `model.n_experts`
        is above 0, and none else.

        `model.first_dense_layers` and `model.moe_every` must be left out in models with a
        `model.layer_pattern` of such letters.
        """
        if bool(self.n_experts) == (SPARSE in self.layer_kinds):
            yield from super().broken_rules(tp)
            return
        yield (
            f"model.n_experts={self.n_experts}, but with model.layer_pattern="
            f"{self.layer_pattern!r} {self.layer_kinds.count(SPARSE)} of {self.n_layers} "
            f"layers are E, those with experts: change one of them."
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
