"""Sizes and choices of a Kimi Linear, the rules between them, and the published model."""

from collections.abc import Iterator
from typing import ClassVar, Self

from msgspec.structs import replace

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.decoder_config import PositiveFloat
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.llama.presets import Preset
from jaxpipe.model.family import Count, ModelFamily, Positive
from jaxpipe.model.layers.moe.config import RouterScore
from jaxpipe.model.recurrent.case import unmet_by_recurrence
from jaxpipe.model.recurrent.config import LINEAR, HybridConfig
from jaxpipe.model.recurrent.delta_config import broken_by_chunk
from jaxpipe.model.variant import LLAMA, Variant


class KimiLinearConfig(
    HybridConfig, DeepseekConfig, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """`[model]`: a Kimi Linear, by preset or by size; most layers have Kimi delta attention.

    Latent attention is that of DeepSeek, in which nothing is rotated here.
    """

    family: str = "kimi_linear"
    norm_eps: PositiveFloat = 1e-5
    n_experts: Positive
    experts_per_token: Positive = 8
    shared_experts: Count = 1
    first_dense_layers: Count = 1
    router_score: RouterScore = "sigmoid"
    router_bias: bool = True
    # one layer in this many has latent attention, and so has the last; the others have Kimi delta
    # attention
    attention_every: Positive = 4
    delta_heads: Positive = 32  # heads of Kimi delta attention
    delta_head_dim: Positive = 128  # width of its queries, keys and values
    delta_taps: Positive = 4  # tokens that its convolutions read, the current one included
    # tokens that it computes by dense products at once, a power of two; results depend on it by
    # rounding alone
    delta_chunk: Positive = 64

    VARIANT: ClassVar[Variant] = LLAMA
    UNREAD: ClassVar[tuple[str, ...]] = "rope_", "mtp_", "index_", "tie_embeddings"

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "d_ff": 8, "v_head_dim": 8}
        >>> sizes |= latent | {"n_layers": 4, "n_experts": 8}
        >>> KimiLinearConfig(**sizes, attention_every=2).layer_kinds
        ('linear_layer', 'sparse', 'linear_sparse', 'sparse')
        """
        last = self.n_layers - 1
        return tuple(
            LINEAR + kind if (i + 1) % self.attention_every and i != last else kind
            for i, kind in enumerate(super().layer_kinds)
        )

    @property
    def has_positions(self) -> bool:
        """Whether attention rotates queries and keys."""
        return False

    @property
    def delta_key_heads(self) -> int:
        """Number of heads of keys of Kimi delta attention, as `GatedDeltaNetwork` reads it."""
        return self.delta_heads

    @property
    def delta_value_heads(self) -> int:
        """Number of its heads of values."""
        return self.delta_heads

    @property
    def delta_key_dim(self) -> int:
        """Width of its keys."""
        return self.delta_head_dim

    @property
    def delta_value_dim(self) -> int:
        """Width of its values."""
        return self.delta_head_dim

    @property
    def recurrent_matrices(self) -> int:
        """Number of parameters in the matrices of Kimi delta attention."""
        d, width = self.d_model, self.delta_head_dim
        channels = self.delta_heads * width
        return 4 * d * channels + 2 * width * (d + channels) + d * self.delta_heads

    @property
    def recurrent_vectors(self) -> int:
        """Number of parameters in its convolutions, decays and norm."""
        channels = self.delta_heads * self.delta_head_dim
        return (3 * self.delta_taps + 1) * channels + self.delta_heads + self.delta_head_dim

    @property
    def recurrent_flops(self) -> int:
        """18 H K^2 per token, as of a gated delta network."""
        return 18 * self.delta_heads * self.delta_head_dim**2

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(super().part(tp), delta_heads=self.delta_heads // tp)

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Sizes of a layer's products on one of `tp` devices, by the settings that give them."""
        channels = self.delta_heads // tp * self.delta_head_dim
        name = "model.delta_heads / parallel.tp x model.delta_head_dim"
        return super().product_sizes(tp) | {name: channels}

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why tokens cannot be mixed as the case asks.

        `parallel.cp_method='ring'` excludes models with Kimi delta attention, and `'ulysses'` needs
        `model.delta_heads` / `parallel.tp` that are a multiple of `parallel.cp`.
        """
        yield from super().unmet_by_attention(case, tp)
        yield from unmet_by_recurrence(
            case, "Kimi delta attention", "model.delta_heads", self.delta_heads, tp
        )

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.delta_heads` must be a multiple of `parallel.tp`.

        What DeepSeek alone has must be left out: settings of rotary positions, of predictions of
        further tokens and of an indexer, and `model.tie_embeddings`.
        """
        yield from super().broken_rules(tp)
        if self.delta_heads % tp:
            yield (
                f"model.delta_heads={self.delta_heads} must be a multiple of parallel.tp={tp}: "
                f"devices that share a layer have whole heads; change one."
            )
        yield from broken_by_chunk(self.delta_chunk)

    def broken_rotary_rules(self) -> Iterator[str]:
        """Yield nothing: no setting of rotary positions is read."""
        yield from ()


_48B: Preset = {
    "n_layers": 27, "d_model": 2304, "n_heads": 32, "d_ff": 9216, "vocab_size": 163840,
    "max_seq_len": 1048576, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_experts": 256, "d_expert": 1024, "router_scale": 2.446,
}  # fmt: skip

KIMI_LINEAR = ModelFamily(
    "kimi_linear",
    KimiLinearConfig,
    {"kimi_linear_48b_a3b": _48B},
    model="jaxpipe.model.families.kimi_linear.decoder:KimiLinearDecoder",
    huggingface="jaxpipe.model.families.kimi_linear.huggingface",
)
