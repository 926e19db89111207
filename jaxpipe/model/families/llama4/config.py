"""Sizes and choices of a Llama 4, and the published models (Meta 2025)."""

from collections.abc import Iterator
from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.families.llama.config import LOCAL, LlamaConfig
from jaxpipe.model.families.llama.presets import Preset, decoder_sizes
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe.config import NotNegative, RouterScore
from jaxpipe.model.variant import Variant


class Llama4Config(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: the text model of a Llama 4, by preset or by size."""

    family: str = "llama4"
    # tokens of a chunk of a document, within which layers with positions attend; 0: all tokens
    attention_chunk: Count = 8192
    # one layer in this many has no positions and attends to all tokens; 0: no layer does
    nope_every: Count = 4
    qk_l2_norm: bool = True  # rotated queries and keys are divided by their root mean square
    # layers without positions multiply the query at position p, from 0, by
    # 1 + temperature_scale ln(1 + floor((p + 1) / temperature_floor)); 0: by 1
    temperature_scale: NotNegative = 0.1
    temperature_floor: Positive = 8192  # positions over which that factor is constant [tokens]
    n_experts: Positive
    router_score: RouterScore = "sigmoid"
    norm_topk_prob: bool = False
    shared_experts: Count = 1

    VARIANT: ClassVar[Variant] = Variant(rotates_neighbours=True, weighs_inputs=True)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer; those with positions are local.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> Llama4Config(**sizes, n_layers=4, n_experts=2, moe_every=2, nope_every=2).layer_kinds
        ('local_layer', 'sparse', 'local_layer', 'sparse')
        """
        every = self.nope_every
        return tuple(
            kind if every and (i + 1) % every == 0 else LOCAL + kind
            for i, kind in enumerate(super().layer_kinds)
        )

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: with all layers like them."""
        return replace(self, nope_every=0 if kind.startswith(LOCAL) else 1)

    @property
    def has_positions(self) -> bool:
        """Whether the layers of a configuration from `of_kind` rotate queries and keys."""
        return self.nope_every != 1

    def flops_per_token(self, seq_len: int) -> int:
        """As of Llama, with at most a chunk of keys in layers with positions."""
        local = sum(kind.startswith(LOCAL) for kind in self.layer_kinds)
        beyond = max(seq_len - self.attention_chunk, 0) if self.attention_chunk else 0
        unseen = 12 * self.n_heads * self.head_size * local * beyond
        return super().flops_per_token(seq_len) - unseen

    def attention_case(self, case: AttentionCase, tp: int) -> AttentionCase:
        """The case with what attention of this model asks for, on one of `tp` devices."""
        return super().attention_case(case, tp)._replace(chunk=self.attention_chunk)

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.attention_chunk` excludes `model.sliding_window`.
        """
        yield from super().broken_rules(tp)
        if self.attention_chunk and self.sliding_window:
            yield (
                f"model.attention_chunk={self.attention_chunk} and model.sliding_window="
                f"{self.sliding_window} both limit the same layers: leave one of them out."
            )


_BOTH = decoder_sizes(48, 5120, 40, 8, 16384) | {
    "head_dim": 128, "vocab_size": 202048, "d_expert": 8192, "rope_theta": 500000.0,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "llama4_scout": _BOTH | {
        "n_experts": 16, "max_seq_len": 10485760, "rope_factor": 16.0, "rope_high_freq_factor": 1.0,
    },
    "llama4_maverick": _BOTH | {
        "n_experts": 128, "moe_every": 2, "max_seq_len": 1048576, "qk_l2_norm": False,
    },
}  # fmt: skip
LLAMA4 = ModelFamily(
    "llama4",
    Llama4Config,
    PRESETS,
    model="jaxpipe.model.families.llama4.decoder:Llama4Decoder",
    huggingface="jaxpipe.model.families.llama4.huggingface",
)
