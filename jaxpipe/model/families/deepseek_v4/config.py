"""Sizes and choices of a DeepSeek-V4, the rules between them, and the published models."""

from collections.abc import Iterator
from math import lcm
from typing import Annotated, ClassVar, Literal, Self, get_args

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe.config import SPARSE, RouterScore
from jaxpipe.model.layers.rope.config import NotNegative, RotaryConfig, Scaling
from jaxpipe.model.variant import Variant

# What the queries of a layer attend to: the last tokens alone, besides them the chosen ones of
# entries that each stand for a few tokens, or besides them all entries, each for many tokens.
Attention = Literal["window", "csa", "hca"]
HASHED = "hashed_"  # in the kinds of layers that choose experts by a table of tokens


def attention_of_kind(kind: str) -> Attention:
    """The attention of the layers of a kind."""
    return next(name for name in get_args(Attention) if kind.startswith(name))


class DeepseekV4Config(RotaryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a DeepSeek-V4; every layer has experts of width `d_ff`.

    The fields of attention and of hyper-connections have the names of the published config.json.
    """

    family: str = "deepseek_v4"
    head_dim: Positive  # width of a head; keys are values, and all heads share them
    qk_rope_head_dim: Positive  # dims of a head, the last ones, that are rotated
    q_lora_rank: Positive  # width of the latent from which queries are computed
    o_groups: Positive  # groups of heads, whose outputs are projected by a matrix of each group
    o_lora_rank: Positive  # width of each group's projected output
    sliding_window: Positive = 128  # last tokens that a query attends to, itself included
    attention_first: tuple[Attention, ...] = ("window", "window")  # attention of the first layers
    attention_cycle: tuple[Attention, ...] = ("csa", "hca")  # of the layers after these, repeated
    csa_rate: Positive = 4  # tokens per entry of compressed sparse attention
    hca_rate: Positive = 128  # tokens per entry of heavily compressed attention
    index_n_heads: Positive = 64  # heads of the indexer, which chooses entries (csa)
    index_head_dim: Positive = 128  # width of a head of the indexer
    index_topk: Positive = 512  # entries that a query attends to (csa)
    rope_theta: PositiveFloat = 10000.0  # base of the rotary wavelengths of layers of windows
    compress_rope_theta: PositiveFloat = 160000.0  # base of those of the other layers
    rope_scaling: Scaling = "yarn"  # of layers with entries; the others have none
    rope_attention_factor: NotNegative = 1.0
    norm_eps: PositiveFloat = 1e-6
    hc_mult: Annotated[int, Meta(ge=1, le=16)] = 4  # copies of a token in the residual stream
    # normalisations of rows and columns of the matrix that mixes the copies
    hc_sinkhorn_iters: Annotated[int, Meta(ge=1, le=100)] = 20
    hc_eps: PositiveFloat = 1e-6  # added to weights and sums of hyper-connections
    num_hash_layers: Count = 3  # first layers that choose experts by a fixed table of tokens
    n_experts: Positive
    experts_per_token: Positive = 6
    shared_experts: Positive = 1
    router_score: RouterScore = "sqrtsoftplus"
    router_scale: PositiveFloat = 1.5
    router_bias: bool = True

    VARIANT: ClassVar[Variant] = Variant("limited", has_sinks=True)

    def attention_of(self, layer: int) -> Attention:
        """What the queries of a layer attend to.

        >>> sizes = {"n_layers": 5, "d_model": 8, "vocab_size": 8, "n_heads": 1, "d_ff": 8}
        >>> widths = {"head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 4, "o_lora_rank": 4}
        >>> model = DeepseekV4Config(**sizes, **widths, o_groups=1, n_experts=8)
        >>> [model.attention_of(layer) for layer in range(5)]
        ['window', 'window', 'csa', 'hca', 'csa']
        """
        first, cycle = self.attention_first, self.attention_cycle
        return first[layer] if layer < len(first) else cycle[(layer - len(first)) % len(cycle)]

    def rate_of(self, attention: Attention) -> int:
        """Tokens per entry in layers of an attention; 0: there are no entries."""
        return {"csa": self.csa_rate, "hca": self.hca_rate}.get(attention, 0)

    @property
    def shard_multiple(self) -> int:
        """Shards and slices of a sequence have complete entries of all layers."""
        kinds = map(self.attention_of, range(self.n_layers))
        return lcm(*(self.rate_of(kind) or 1 for kind in kinds))

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer: its attention, and whether it chooses experts by a table."""
        return tuple(
            f"{self.attention_of(i)}_{HASHED * (i < self.num_hash_layers)}{SPARSE}"
            for i in range(self.n_layers)
        )

    @property
    def hashed_layers(self) -> tuple[int, ...]:
        """Indices of the layers that choose experts by a table of tokens."""
        return tuple(range(min(self.num_hash_layers, self.n_layers)))

    @property
    def scored_layers(self) -> tuple[int, ...]:
        """Indices of the layers that choose the experts of the highest scores."""
        return tuple(range(len(self.hashed_layers), self.n_layers))

    def variable_layers(self, name: str) -> tuple[int, ...]:
        """Indices of the layers that an entry of the first dim of a variable belongs to, each."""
        return self.scored_layers if name == "router_bias" else self.hashed_layers

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: their own wavelengths."""
        if attention_of_kind(kind) == "window":
            return replace(self, rope_scaling="linear", rope_factor=1.0)
        return replace(self, rope_theta=self.compress_rope_theta)

    @property
    def rotary_size(self) -> int:
        """Number of a head's dims that rotate."""
        return self.qk_rope_head_dim

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return 1

    @property
    def window(self) -> int:
        """Number of last tokens that a query attends to, itself included."""
        return self.sliding_window

    @property
    def has_cache(self) -> bool:
        """Generation computes all tokens again: entries have no cache."""
        return False

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per layer."""
        return self._matrices(experts) + self._vectors() + 2 * self.vocab_size * self.d_model

    def _matrices(self, experts: int) -> int:
        """Number of parameters in the matrices of layers, and in those of hyper-connections."""
        kinds, copies = list(map(self.attention_of, range(self.n_layers))), self.hc_mult
        attention = self.n_layers * self._attention_matrices()
        entries = sum(self._entry_matrices(kind) for kind in kinds)
        width = copies * self.d_model
        hyper = 2 * self.n_layers * width * (2 + copies) * copies + width * copies
        return attention + entries + hyper + self.mlp_parameters(experts)

    def _attention_matrices(self) -> int:
        """Number of parameters in the matrices of a layer's attention, without its entries."""
        d, queries = self.d_model, self.n_heads * self.head_dim
        outputs = queries * self.o_lora_rank + self.o_groups * self.o_lora_rank * d
        return self.q_lora_rank * (d + queries) + d * self.head_dim + outputs

    def _entry_matrices(self, attention: Attention) -> int:
        """Number of parameters in the matrices that make, and for `csa` choose, entries."""
        d, own, chosen = self.d_model, self.head_dim, self.index_head_dim
        if attention == "window":
            return 0
        if attention == "hca":
            return 2 * d * own
        heads = self.index_n_heads
        return 2 * d * 2 * (own + chosen) + self.q_lora_rank * heads * chosen + d * heads

    def _vectors(self) -> int:
        """Number of parameters in norms, sinks and biases."""
        kinds, copies = list(map(self.attention_of, range(self.n_layers))), self.hc_mult
        layer = 2 * self.d_model + self.q_lora_rank + self.head_dim + self.n_heads
        layer += 2 * ((2 + copies) * copies + 3)
        own, chosen = self.head_dim, self.index_head_dim
        entries = {
            "window": 0,
            "hca": self.hca_rate * own + own,
            "csa": 2 * self.csa_rate * (own + chosen) + own + chosen,
        }
        return (
            self.n_layers * layer + sum(entries[kind] for kind in kinds) + self.d_model + copies + 1
        )

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter, and 12 H K for every key and entry that a query attends to.

        The embedding look-up is free, and of routed experts only those a token chooses count. The
        indexer's scores count 6 per head, dim and entry.
        """
        matrices = self._matrices(self.experts_per_token) + self.vocab_size * self.d_model
        keys, scored = 0, 0
        for kind in map(self.attention_of, range(self.n_layers)):
            keys += min(seq_len, self.sliding_window)
            if kind == "hca":
                keys += seq_len // self.hca_rate
            if kind == "csa":
                keys += min(seq_len // self.csa_rate, self.index_topk)
                scored += seq_len // self.csa_rate
        indexer = 6 * self.index_n_heads * self.index_head_dim * scored
        return 6 * matrices + 12 * self.n_heads * self.head_dim * keys + indexer

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            self.resolved(),
            n_heads=self.n_heads // tp,
            o_groups=self.o_groups // tp,
            d_ff=self.d_ff // tp,
            d_expert=self.d_expert // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them.

        Those of groups of heads and of entries, and of the indexer, are not in 8-bit floats.
        """
        return super().product_sizes(tp) | {
            "model.q_lora_rank": self.q_lora_rank,
            "model.o_groups / parallel.tp x model.o_lora_rank": (
                self.o_groups // tp * self.o_lora_rank
            ),
        }

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.o_groups` must divide `model.n_heads`, and be a multiple of `parallel.tp`.

        `model.qk_rope_head_dim` must be at most `model.head_dim`, and so must be the even part of
        `model.index_head_dim` that rotates.

        `model.attention_cycle` must name the attention of a layer, if `model.attention_first` has
        fewer than `model.n_layers` entries.
        """
        yield from self.unequal_parts(tp)
        if self.n_heads % self.o_groups or self.o_groups % tp:
            yield (
                f"model.o_groups={self.o_groups} must divide model.n_heads={self.n_heads} and be a "
                f"multiple of parallel.tp={tp}: every device projects the outputs of whole groups "
                f"of heads; change one of them."
            )
        if self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            yield (
                f"model.qk_rope_head_dim={self.qk_rope_head_dim} exceeds model.head_dim="
                f"{self.head_dim} or model.index_head_dim={self.index_head_dim}, of which it is "
                f"the rotated part: lower it."
            )
        if not self.attention_cycle and len(self.attention_first) < self.n_layers:
            yield (
                f"model.attention_cycle is empty, but model.attention_first has the attention of "
                f"only {len(self.attention_first)} of {self.n_layers} layers: give the other."
            )
            return
        yield from self.broken_mixture_rules(tp)
        yield from self.broken_rotary_rules()

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why attention cannot be computed as the case asks.

        `parallel.cp_method` must be `gather` with `parallel.cp` above 1, `model.attention` `xla`
        and `model.attention_dropout` 0 in families of models that attend to entries.
        """
        family = f"in models of the family {self.family!r}, whose entries stand for several tokens"
        if case.sequence.heads and case.sequence.size > 1:
            yield (
                f"parallel.cp_method must be 'gather' with parallel.cp={case.sequence.size} "
                f"{family}: these do not go round a ring and have no heads to exchange; set that."
            )
        if self.attention != "xla" or self.attention_dropout:
            yield (
                f"model.attention={self.attention!r} with model.attention_dropout="
                f"{self.attention_dropout} must be 'xla' with 0 {family}: leave both out."
            )


# DeepSeek-AI 2026, "DeepSeek-V4", and the config.json of the published model.
_FLASH = {
    "n_layers": 43, "d_model": 4096, "n_heads": 64, "head_dim": 512, "d_ff": 2048,
    "vocab_size": 129280, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "n_experts": 256, "rope_factor": 16.0, "rope_original_positions": 65536,
    "max_seq_len": 1048576,
}  # fmt: skip
DEEPSEEK_V4 = ModelFamily(
    "deepseek_v4",
    DeepseekV4Config,
    {"deepseek_v4_flash": _FLASH},
    model="jaxpipe.model.families.deepseek_v4.decoder:DeepseekV4Decoder",
    huggingface="jaxpipe.model.families.deepseek_v4.huggingface",
)
