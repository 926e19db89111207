"""Sizes and choices that decoders of all families have, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.attention.case import SUPPORTS, AttentionCase
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

    def attention_case(self, case: AttentionCase, tp: int) -> AttentionCase:
        """The case with what attention of this model asks for, on one of `tp` devices."""
        return case._replace(
            window=self.window,
            dropout=self.attention_dropout,
            heads=self.n_heads // tp,
            width=self.head_size,
        )

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why attention cannot be computed as the case asks."""
        if unmet := SUPPORTS[self.attention](self.attention_case(case, tp)):
            yield unmet
        if case.sequence.heads:
            yield from self._unequal_shares(case.sequence, tp)

    def _unequal_shares(self, sequence: FullSequence, tp: int) -> Iterator[str]:
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

        `model.d_model` must be a multiple of `model.n_heads`, unless `model.head_dim` is given.
        """
        for name in ("n_heads", "d_ff"):
            if getattr(self, name) % tp:
                yield (
                    f"model.{name}={getattr(self, name)} must be a multiple of parallel.tp={tp}: "
                    f"devices that share a layer have equal parts of it; change one of them."
                )
        if not self.head_dim and self.d_model % self.n_heads:
            yield (
                f"model.d_model={self.d_model} must be a multiple of model.n_heads={self.n_heads}: "
                f"change one, or give model.head_dim."
            )
