"""Sizes and choices that decoders of every family have, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.model.family import Count, ModelConfig, Positive
from jaxpipe.partition.sequence import WholeSequence

PositiveFloat = Annotated[float, Meta(gt=0)]
Chance = Annotated[float, Meta(ge=0, lt=1)]


class DecoderConfig(ModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: what every stack of attention and MLP has."""

    n_heads: Positive  # query heads
    head_dim: Count = 0  # width of a head; 0: d_model / n_heads
    d_ff: Positive  # hidden width of the MLP
    norm_eps: PositiveFloat = 1e-5  # added to the mean square in every norm
    attention: Literal["xla", "cudnn"] = "xla"  # plain products, or the fused one of cuDNN
    dropout: Chance = 0.0  # in training: of the embedding, and of what a layer adds to the stream
    attention_dropout: Chance = 0.0  # in training: of a query's share in a key

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        return ("layer",) * self.n_layers

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """How many last tokens one attends to, itself included; 0: all."""
        return 0

    def resolved(self) -> Self:
        """The same with the width of a head."""
        return replace(self, head_dim=self.head_size)

    def product_sizes(self, tp: int) -> dict[str, int]:
        """The sizes of a layer's products on one of `tp` devices, by the settings they are of."""
        heads, keys = self.n_heads // tp, max(self.key_heads // tp, 1)
        return {
            "model.d_model": self.d_model,
            "model.n_heads / parallel.tp x model.head_dim": heads * self.head_size,
            "the width of a device's keys, heads x model.head_dim,": keys * self.head_size,
            "model.d_ff / parallel.tp": self.d_ff // tp,
        }

    def unmet_needs(self, platform: str) -> Iterator[str]:
        """A sentence for everything that devices of this `jax.Device.platform` do not have."""
        if self.attention == "cudnn" and platform not in ("gpu", "cuda"):
            yield (
                f"model.attention='cudnn' needs an NVIDIA GPU and cuDNN, which jax finds together, "
                f"but the devices are of the platform {platform!r}: set model.attention=xla."
            )

    def unmet_by_packing(
        self, capability: float | None, rows: tuple[int, int], *, dtype: str, tp: int
    ) -> Iterator[str]:
        """A sentence for every reason why documents that share a row could not be kept apart."""
        if self.attention != "cudnn":
            return
        if capability is not None and capability < 9:
            yield (
                f"data.packing with model.attention='cudnn' needs GPUs of compute capability 9.0 "
                f"(Hopper) or later, but these have {capability}: set model.attention=xla."
            )
        yield from unmet_by_packed_kernel((*rows, self.n_heads // tp, self.head_size), dtype)

    def unmet_by_context(
        self, sequence: WholeSequence, *, tp: int, dtype: str, packed: bool
    ) -> Iterator[str]:
        """A sentence for every reason why replicas cannot share a `sequence` as it says."""
        if not sequence.heads:
            return
        if self.attention_dropout:
            yield (
                f"model.attention_dropout={self.attention_dropout} with replicas that share a "
                f"sequence: shares that may be dropped are kept with gathered keys alone; set "
                f"parallel.cp_method=gather, or model.attention_dropout=0."
            )
        if sequence.ring > 1:
            yield from self._unmet_by_fused_ring(dtype, packed)
        yield from self._unmet_by_exchange(sequence, tp)

    def _unmet_by_exchange(self, sequence: WholeSequence, tp: int) -> Iterator[str]:
        """A sentence where replicas that exchange heads cannot have equal shares of them."""
        heads, keys = self.n_heads // tp, max(self.key_heads // tp, 1)

        def shared_by(count: int) -> bool:
            return heads % count == 0 and (keys % count == 0 or count % keys == 0)

        if shared_by(sequence.heads):
            return
        counts = range(sequence.heads, 0, -1)
        most = next(count for count in counts if sequence.size % count == 0 and shared_by(count))
        yield (
            f"{sequence.heads} replicas exchange heads (parallel.cp={sequence.size}), but of the "
            f"{heads} heads and {keys} key/value heads of a device (model.n_heads={self.n_heads}, "
            f"parallel.tp={tp}) each would not have an equal share: set parallel.cp_method=ring "
            f"and parallel.cp_heads={most}, or another parallel.cp."
        )

    def _unmet_by_fused_ring(self, dtype: str, packed: bool) -> Iterator[str]:
        """A sentence for everything that cuDNN's kernel cannot do with keys that go round."""
        if self.attention != "cudnn":
            return
        yield from unmet_by_kernel(self.head_size, dtype)
        if packed or self.window:
            what = "data.packing" if packed else f"a window of {self.window} tokens"
            yield (
                f"parallel.cp_method='ring' and model.attention='cudnn' with {what}: of keys that "
                f"go round the kernel takes all or none; set model.attention=xla, or "
                f"parallel.cp_method=ulysses."
            )

    def flops_of(self, matrices: int, keys: int) -> int:
        """FLOPs that training is said to take a token: 6 per matrix parameter, 12 L H K a key.

        Chowdhery et al. 2022 (PaLM), appendix B: no discount for the causal mask, recomputation not
        counted.
        """
        return 6 * matrices + 12 * self.n_layers * self.n_heads * self.head_size * keys

    def unequal_parts(self, tp: int) -> Iterator[str]:
        """A sentence for every size that leaves no equal parts for heads or `tp` devices."""
        for name in ("n_heads", "d_ff"):
            if getattr(self, name) % tp:
                yield (
                    f"model.{name}={getattr(self, name)} must be a multiple of parallel.tp={tp}: "
                    f"devices that share a layer have equal parts of it; change one of them."
                )
        if self.attention_dropout and self.attention == "cudnn":
            yield (
                f"model.attention_dropout={self.attention_dropout} drops shares that the kernel of "
                f"model.attention='cudnn' keeps to itself: set model.attention=xla, or "
                f"model.attention_dropout=0."
            )
        if not self.head_dim and self.d_model % self.n_heads:
            yield (
                f"model.d_model={self.d_model} must be a multiple of model.n_heads={self.n_heads}: "
                f"change one, or give model.head_dim."
            )


def unmet_by_kernel(width: int, dtype: str) -> Iterator[str]:
    """A sentence where cuDNN's kernel is not for heads of such a width and dtype."""
    if dtype not in ("bfloat16", "float16") or width % 8 or width > 256:
        yield (
            f"attention of cuDNN takes bfloat16 or float16, and heads whose width is a multiple of "
            f"8 up to 256, but these are {dtype} of width {width}: change train.compute_dtype or "
            f"the heads, or set model.attention=xla."
        )


def unmet_by_packed_kernel(queries: tuple[int, int, int, int], dtype: str) -> Iterator[str]:
    """A sentence for everything that cuDNN's packed form cannot do for queries `[B, S, H, K]`."""
    rows, tokens, heads, width = queries
    yield from unmet_by_kernel(width, dtype)
    if rows * tokens * heads * width >= 2**31:
        yield (
            f"attention of cuDNN within documents counts elements in int32, but {rows} rows of "
            f"{tokens} tokens with {heads} heads of {width} are 2^31 or more: lower "
            f"train.microbatch_size, or set model.attention=xla."
        )
