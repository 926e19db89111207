"""Sizes and choices of a DeepSeek decoder, and the rules between them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase, indexed_supports
from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.family import Count, Positive
from jaxpipe.model.layers.moe.config import GROUPED, NotNegative
from jaxpipe.model.layers.rope.config import RotaryConfig
from jaxpipe.model.prediction.config import Depth, PredictingConfig
from jaxpipe.model.variant import Variant

BLOCK = "block_"  # prefix of the names of blocks of a layer that has several


class DeepseekConfig(
    PredictingConfig, RotaryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`[model]`: a decoder with multi-head latent attention, with experts or without.

    The fields of attention have the names of the published config.json.
    """

    kv_lora_rank: Positive  # width of the latent from which keys and values are computed
    # width of the latent from which queries are computed; 0: no latent, queries come from x
    q_lora_rank: Count = 0
    qk_nope_head_dim: Positive  # dims of a query or key head that are not rotated
    qk_rope_head_dim: Positive  # dims of a query head that are rotated; all heads share their keys
    v_head_dim: Positive  # width of a head's values
    norm_eps: PositiveFloat = 1e-6  # added to the mean square in every norm
    rope_theta: PositiveFloat = 10000.0  # base of the rotary wavelengths
    tie_embeddings: bool = False  # the head is the transposed embedding
    # number of further tokens that each position predicts in training (multi-token prediction),
    # each by a block of its own; 0: none
    mtp_depth: Depth = 0
    # weight of the loss of the further tokens: the mean over depths of the mean over the targets
    # at each depth (DeepSeek-V3 report, equations 24 and 25)
    mtp_weight: NotNegative = 0.1

    # keys that each query attends to, which an indexer in every layer chooses (DeepSeek-V3.2);
    # 0: all, and no layer has an indexer
    index_topk: Count = 0
    index_n_heads: Count = 0  # heads of the indexer
    index_head_dim: Count = 0  # width of the indexer's heads
    # the indexer's pairs of dims that rotate are (2i, 2i + 1), as attention's are (GLM-5), and not
    # (i, i + model.qk_rope_head_dim / 2)
    index_rotates_neighbours: bool = False
    # weight of the indexer's loss, the divergence of its scores from attention's probabilities:
    # its mean over tokens, summed over layers. Nothing else trains the indexer; 0: it is frozen
    index_loss: NotNegative = 1.0
    # consecutive layers that attend to the keys which the first of them chooses (GLM-5.2). They are
    # one layer of the pipeline, so that no stage begins within them
    index_group: Positive = 1
    index_first: Count = 0  # layers before these groups; each has an indexer of its own
    # train the indexer alone, beside attention to all keys: all other parameters are frozen
    index_warmup: bool = False

    VARIANT: ClassVar[Variant] = Variant(rotates_neighbours=True)

    @property
    def head_size(self) -> int:
        """Width of a query or key head, both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """Width of a head's values, and of its output."""
        return self.v_head_dim

    @property
    def rotary_size(self) -> int:
        """Number of a head's dims that rotate, as `rotary` gets them."""
        return self.qk_rope_head_dim

    def for_inference(self, *, dropless: bool = True) -> Self:
        """The same model without predictions of further tokens and the indexer's loss."""
        loss = 0.0 if self.index_topk and not self.index_warmup else self.index_loss
        return replace(super().for_inference(dropless=dropless), index_loss=loss)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Index of the first block of every layer: a group of layers is one."""
        alone = min(self.index_first, self.n_layers)
        first = *range(alone), *range(alone, self.n_layers, self.index_group)
        return (*first, self.n_layers) if self.mtp_depth else first

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer: of a group those of its blocks, joined.

        >>> latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "d_ff": 8, "v_head_dim": 8}
        >>> sizes |= latent | {"n_layers": 5, "n_experts": 2, "first_dense_layers": 2}
        >>> DeepseekConfig(**sizes, index_group=3, index_first=1).layer_kinds
        ('layer', 'layer+sparse+sparse', 'sparse')
        """
        kinds = super().layer_kinds
        bounds = pairwise((*self.first_blocks, len(kinds)))
        return tuple(GROUPED.join(kinds[begin:end]) for begin, end in bounds)

    def block_of(self, layer: int, path: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Index of the published layer that a parameter of a layer is in, and its path there."""
        first, (part, *rest) = self.first_blocks[layer], path
        if not part.startswith(BLOCK):
            return first, path
        return first + int(part.removeprefix(BLOCK)), tuple(rest)

    @property
    def indexers(self) -> int:
        """Number of blocks with an indexer."""
        return len(self.first_blocks) - (self.mtp_depth > 0) + self.mtp_depth

    @property
    def key_heads(self) -> int:
        """Number of key/value heads, as attention reads them."""
        return self.n_heads

    @property
    def tied(self) -> bool:
        """Whether the head is the transposed embedding."""
        return self.tie_embeddings

    @property
    def score_scale(self) -> float:
        """Factor on the scores besides 1 / sqrt(head_size), as DeepSeek applies yarn."""
        is_scaled = self.rope_scaling == "yarn"
        return self.yarn_scale(self.rope_mscale_all_dim) ** 2 if is_scaled else 1.0

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        embed_head = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        matrices = self.mixer_matrices + self.mlp_parameters(experts)
        return matrices + self.prediction_matrices + embed_head + self._vectors

    @property
    def mixer_matrices(self) -> int:
        """Number of parameters of the matrices that mix tokens, in all layers."""
        own = self.blocks * self._attention_matrices()
        return own + self.indexers * self._index_matrices()

    def _attention_matrices(self) -> int:
        """Number of parameters of the matrices of a layer's attention."""
        d, heads, latent = self.d_model, self.n_heads, self.kv_lora_rank
        queries = heads * self.head_size
        q = self.q_lora_rank * (d + queries) if self.q_lora_rank else d * queries
        k_and_v = latent * heads * (self.qk_nope_head_dim + self.v_head_dim)
        keys = d * (latent + self.qk_rope_head_dim)
        return q + keys + k_and_v + heads * self.v_head_dim * d

    def _index_matrices(self) -> int:
        """Number of parameters of the matrices of an indexer."""
        heads, width = self.index_n_heads, self.index_head_dim
        return self.q_lora_rank * heads * width + self.d_model * (heads + width)

    @property
    def _vectors(self) -> int:
        """Number of parameters of all norms."""
        norms = (2 * self.blocks + 1) * self.d_model
        return self.mixer_vectors + norms + self.prediction_vectors

    @property
    def mixer_vectors(self) -> int:
        """Number of parameters of the norms within attention and indexers."""
        attention = self.blocks * (self.q_lora_rank + self.kv_lora_rank)
        return attention + self.indexers * 2 * self.index_head_dim

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter, and 6 L H S times the widths of a key and a value.

        The embedding look-up is free, and of routed experts only those a token chooses count. The
        head multiplies once more for every further token. With an indexer S are the chosen keys,
        for which it adds 6 I E, and 2 I E for all others, whose scores have no gradient; before its
        warm-up ends S are all keys.
        """
        head = self.vocab_size * self.d_model
        embedding = 0 if self.tie_embeddings else head
        matrices = self.active_parameter_count() - self._vectors - embedding
        keys = self.attended_keys(seq_len)
        index = 2 * self.index_n_heads * self.index_head_dim * (seq_len + 2 * keys)
        return self.flops_of(matrices + self.mtp_depth * head, keys=keys) + self.indexers * index

    def attended_keys(self, seq_len: int) -> int:
        """Number of keys of a query that all may see, of which it attends to the chosen ones."""
        is_limited = self.index_topk and not self.index_warmup
        return min(self.index_topk, seq_len) if is_limited else seq_len

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            self.resolved(),
            n_heads=self.n_heads // tp,
            d_ff=self.d_ff // tp,
            d_expert=self.d_expert // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Sizes of a layer's products on one of `tp` devices, by the settings that give them."""
        heads, nope, rope = self.n_heads // tp, self.qk_nope_head_dim, self.qk_rope_head_dim
        base = super().product_sizes(tp)
        sizes = {name: size for name, size in base.items() if "head_dim" not in name}
        each = "model.n_heads / parallel.tp x"
        return sizes | {
            f"{each} (model.qk_nope_head_dim + model.qk_rope_head_dim)": heads * (nope + rope),
            f"{each} (model.qk_nope_head_dim + model.v_head_dim)": heads * (nope + self.v_head_dim),
            f"{each} model.v_head_dim": heads * self.v_head_dim,
            "model.q_lora_rank": self.q_lora_rank,
            "model.kv_lora_rank": self.kv_lora_rank,
            "model.kv_lora_rank + model.qk_rope_head_dim": self.kv_lora_rank + rope,
        }

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.head_dim` must be left out, or the sum of `model.qk_nope_head_dim` and
        `model.qk_rope_head_dim`, with latent attention.
        """
        if self.head_dim not in (0, self.head_size):
            yield (
                f"model.head_dim={self.head_dim} must be model.qk_nope_head_dim="
                f"{self.qk_nope_head_dim} + model.qk_rope_head_dim={self.qk_rope_head_dim} in "
                f"models of the family {self.family!r}: leave it out."
            )
        yield from self.resolved().unequal_parts(tp)
        yield from self.broken_mixture_rules(tp)
        yield from self.broken_rotary_rules()
        yield from self._broken_index_rules()

    def _broken_index_rules(self) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes of the indexer break.

        `model.index_topk`, `model.index_n_heads` and `model.index_head_dim` must all be given, or
        none of them.

        `model.index_topk` needs `model.q_lora_rank`, and `model.index_head_dim` of at least
        `model.qk_rope_head_dim`.

        `model.index_warmup`, `model.index_loss`, `model.index_rotates_neighbours` and
        `model.index_group` need `model.index_topk`, and `model.index_first` a `model.index_group`.

        `model.index_warmup` needs `model.index_loss` above 0, and `model.router_bias_rate=0`.
        """
        sizes = self.index_topk, self.index_n_heads, self.index_head_dim
        if not any(sizes):
            others = ("warmup", False), ("loss", 1), ("rotates_neighbours", False), ("group", 1)
            for name, default in (*others, ("first", 0)):
                if (value := getattr(self, f"index_{name}")) != default:
                    yield (
                        f"model.index_{name}={value} is of an indexer, but model.index_topk=0: set "
                        f"model.index_topk, or leave it out."
                    )
            return
        if self.index_first and self.index_group == 1:
            yield (
                f"model.index_first={self.index_first} counts layers before groups, but with "
                f"model.index_group=1 there are none: raise model.index_group, or leave it out."
            )
        if self.index_warmup and not self.index_loss:
            yield (
                "model.index_warmup=true trains the indexer alone, but with model.index_loss=0 it "
                "has nothing to learn: raise it."
            )
        if self.index_warmup and self.router_bias_rate:
            yield (
                f"model.index_warmup=true freezes all but the indexer, but "
                f"model.router_bias_rate={self.router_bias_rate} changes the router's biases: set "
                f"it to 0, with model.router_bias=true."
            )
        if not all(sizes):
            yield (
                f"model.index_topk={sizes[0]}, model.index_n_heads={sizes[1]} and "
                f"model.index_head_dim={sizes[2]} are sizes of one indexer: give all three, or "
                f"leave all out."
            )
        if not self.q_lora_rank:
            yield (
                f"model.index_topk={self.index_topk} needs model.q_lora_rank, the latent from "
                f"which the indexer's queries are computed: give it, or leave the indexer out."
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            yield (
                f"model.index_head_dim={self.index_head_dim} must be at least "
                f"model.qk_rope_head_dim={self.qk_rope_head_dim}, the dims of an index head that "
                f"are rotated: raise it."
            )

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why attention cannot be computed as the case asks.

        `model.attention` must be `xla` with `model.index_topk`.
        """
        if not self.index_topk:
            yield from super().unmet_by_attention(case, tp)
            return
        if self.attention != "xla":
            yield (
                f"model.attention={self.attention!r} has no kernel for the keys that "
                f"model.index_topk={self.index_topk} chooses: set model.attention=xla."
            )
        if unmet := indexed_supports(self.attention_case(case, tp)):
            yield unmet
