"""Sizes and choices that decoders of all families have, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.family import Count, ModelConfig, Positive

PositiveFloat = Annotated[float, Meta(gt=0)]
Chance = Annotated[float, Meta(ge=0, lt=1)]


class DecoderConfig(ModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: the fields of every decoder that is a stack of attention and MLP."""

    n_heads: Positive  # number of query heads
    head_dim: Count = 0  # width of a head; 0: d_model / n_heads
    d_ff: Positive  # hidden width of the MLP
    norm_eps: PositiveFloat = 1e-5  # added to the mean square or variance in every norm
    attention: Literal["xla", "cudnn"] = "xla"  # plain matrix products, or cuDNN's fused kernel
    dropout: Chance = 0.0  # rate in training, of the embedding and of each sublayer's output
    attention_dropout: Chance = 0.0  # rate in training, of attention probabilities; needs xla

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def value_size(self) -> int:
        """Width of a head's values, and of its output."""
        return self.head_size

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        return ("layer",) * self.n_layers

    @property
    def blocks(self) -> int:
        """Number of blocks of attention and MLP, or experts, in all layers."""
        return self.n_layers

    @property
    def key_heads(self) -> int:
        """Number of key/value heads."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Number of last tokens that a query attends to, itself included; 0: all."""
        return 0

    @property
    def logit_cap(self) -> float:
        """Bound on logits: a soft cap (`jaxpipe.model.loss.softcap`); 0: none."""
        return 0.0

    def resolved(self) -> Self:
        """The same configuration with `head_dim` filled in."""
        return replace(self, head_dim=self.head_size)

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them."""
        heads, keys = self.n_heads // tp, max(self.key_heads // tp, 1)
        return {
            "model.d_model": self.d_model,
            "model.n_heads / parallel.tp x model.head_dim": heads * self.head_size,
            "the width of a device's keys, heads x model.head_dim,": keys * self.head_size,
            "model.d_ff / parallel.tp": self.d_ff // tp,
        }

    def for_generation(self) -> Self:
        """The same model without cuDNN's attention."""
        return replace(self, attention="xla")

    def unmet_needs(self, platform: str, *, dtype: str, deterministic: bool) -> Iterator[str]:
        """Yield a sentence for every requirement of the attention that is not met.

        `model.attention='cudnn'` needs an NVIDIA GPU and cuDNN, and excludes `train.deterministic`.
        """
        if self.attention != "cudnn":
            return
        if platform not in ("gpu", "cuda"):
            yield (
                f"model.attention='cudnn' needs an NVIDIA GPU and cuDNN, which jax finds together, "
                f"but the devices are of the platform {platform!r}: set model.attention=xla."
            )
        yield from unmet_by_kernel(self.head_size, dtype)
        if deterministic:
            yield (
                "train.deterministic=true with model.attention='cudnn': XLA ends such a step with "
                "an error of its own (an H100, jax 0.11.2, cuDNN 9.19); set model.attention=xla, "
                "or leave train.deterministic out."
            )

    def unmet_by_packing(
        self, capability: float | None, rows: tuple[int, int], *, dtype: str, tp: int
    ) -> Iterator[str]:
        """Yield a sentence for every reason why documents in a packed row cannot be kept apart.

        `data.packing` with `model.attention='cudnn'` needs GPUs of compute capability 9.0 or later,
        and what cuDNN's kernel needs (`model.attention`).
        """
        if self.attention != "cudnn":
            return
        if capability is not None and capability < 9:
            yield (
                f"data.packing with model.attention='cudnn' needs GPUs of compute capability 9.0 "
                f"(Hopper) or later, but these have {capability}: set model.attention=xla."
            )
        yield from unmet_by_packed_kernel((*rows, self.n_heads // tp, self.head_size), dtype)

    def unmet_by_context(self, sequence: FullSequence, *, tp: int, packed: bool) -> Iterator[str]:
        """Yield a sentence for every reason why replicas cannot share sequences as `sequence` does.

        `model.attention_dropout` needs `parallel.cp_method='gather'`, if `parallel.cp` is above 1.
        """
        if not sequence.heads:
            return
        if self.attention_dropout:
            yield (
                f"model.attention_dropout={self.attention_dropout} with replicas that share a "
                f"sequence: shares that may be dropped are kept with gathered keys alone; set "
                f"parallel.cp_method=gather, or model.attention_dropout=0."
            )
        if sequence.ring > 1:
            yield from self._unmet_by_fused_ring(packed)
        yield from self._unmet_by_exchange(sequence, tp)

    def _unmet_by_exchange(self, sequence: FullSequence, tp: int) -> Iterator[str]:
        """Yield a sentence if replicas that exchange heads cannot have equal shares of them.

        `model.n_heads` / `parallel.tp`, and the key/value heads likewise, must have equal shares
        for the replicas that exchange heads: `parallel.cp` for `parallel.cp_method='ulysses'`,
        `parallel.cp_heads` for `'ring'`. Key/value heads may also be fewer and divide these
        replicas.
        """
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

    def _unmet_by_fused_ring(self, packed: bool) -> Iterator[str]:
        """Yield a sentence for everything that cuDNN's kernel does not support in ring attention.

        `parallel.cp_method='ring'` with `model.attention='cudnn'` excludes `data.packing` and a
        sliding window.
        """
        if self.attention != "cudnn":
            return
        if packed or self.window:
            what = "data.packing" if packed else f"a window of {self.window} tokens"
            yield (
                f"parallel.cp_method='ring' and model.attention='cudnn' with {what}: of keys that "
                f"go round the kernel takes all or none; set model.attention=xla, or "
                f"parallel.cp_method=ulysses."
            )

    def flops_of(self, matrices: int, keys: int) -> int:
        """Model FLOPs of training per token: 6 per matrix parameter, and 12 L H K per key.

        K is the mean width of a head's keys and values. Chowdhery et al. 2022 (PaLM), appendix B:
        the causal mask gives no discount, and recomputation does not count.
        """
        widths = self.head_size + self.value_size
        return 6 * matrices + 6 * self.blocks * self.n_heads * widths * keys

    def unequal_parts(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every size that heads or `tp` devices do not divide equally.

        `model.n_heads` and `model.d_ff` must be multiples of `parallel.tp`.

        `model.attention_dropout` excludes `model.attention='cudnn'`.

        `model.d_model` must be a multiple of `model.n_heads`, unless `model.head_dim` is given.
        """
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
    """Yield a sentence if cuDNN's kernel does not support heads of this width and dtype.

    `model.attention='cudnn'` needs `train.compute_dtype` bfloat16 or float16, and a width of heads
    that is a multiple of 8 up to 256.
    """
    if dtype not in ("bfloat16", "float16") or width % 8 or width > 256:
        yield (
            f"attention of cuDNN takes bfloat16 or float16, and heads whose width is a multiple of "
            f"8 up to 256, but these are {dtype} of width {width}: change train.compute_dtype or "
            f"the heads, or set model.attention=xla."
        )


def unmet_by_packed_kernel(queries: tuple[int, int, int, int], dtype: str) -> Iterator[str]:
    """Yield a sentence for every reason why cuDNN's packed form rejects queries `[B, S, H, K]`.

    `train.microbatch_size` x `train.seq_len` x heads of a device x their width must be less than
    2^31, with `data.packing` and `model.attention='cudnn'`.
    """
    rows, tokens, heads, width = queries
    yield from unmet_by_kernel(width, dtype)
    if rows * tokens * heads * width >= 2**31:
        yield (
            f"attention of cuDNN within documents counts elements in int32, but {rows} rows of "
            f"{tokens} tokens with {heads} heads of {width} are 2^31 or more: lower "
            f"train.microbatch_size, or set model.attention=xla."
        )
