"""Sizes and choices of a Llama-style decoder, and the rules between them."""

from collections.abc import Iterator
from typing import Self

from msgspec.structs import replace

from jaxpipe.model.family import Count, Positive
from jaxpipe.model.rope.config import RotaryConfig


class LlamaConfig(RotaryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Llama-style decoder, with experts or without, by preset or by size."""

    n_kv_heads: Positive  # number of key/value heads; divides n_heads
    sliding_window: Count = 0  # last tokens that a query attends to, itself included; 0: all
    qk_norm: bool = False  # RMSNorm on every query and key head (Qwen3)
    tie_embeddings: bool = False  # the head is the transposed embedding

    @property
    def key_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_heads

    @property
    def tied(self) -> bool:
        """Whether the head is the transposed embedding."""
        return self.tie_embeddings

    @property
    def window(self) -> int:
        """Number of last tokens that a query attends to, itself included; 0: all."""
        return self.sliding_window

    def parameter_count(self) -> int:
        """Number of parameters, from the sizes alone."""
        return self._parameters(self.n_experts)

    def active_parameter_count(self) -> int:
        """Number of parameters per token: of routed experts only the chosen ones count."""
        return self._parameters(self.experts_per_token if self.n_experts else 0)

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        d, k = self.d_model, self.head_size
        attention = 2 * d * k * (self.n_heads + self.n_kv_heads) + 2 * k * self.qk_norm
        ends = self.vocab_size * d * (1 if self.tie_embeddings else 2) + d
        return self.n_layers * (attention + 2 * d) + self.mlp_parameters(experts) + ends

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter and 12 L H K S of attention, with S at most the window.

        The embedding look-up is free, and of routed experts only those a token chooses count.
        """
        embedding = self.vocab_size * self.d_model
        vectors = (2 * self.n_layers + 1) * self.d_model
        vectors += 2 * self.n_layers * self.head_size * self.qk_norm
        matrices = self.active_parameter_count() - vectors
        matrices -= 0 if self.tie_embeddings else embedding
        return self.flops_of(matrices, keys=min(seq_len, self.sliding_window or seq_len))

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            self.resolved(),
            n_heads=self.n_heads // tp,
            n_kv_heads=max(self.n_kv_heads // tp, 1),
            d_ff=self.d_ff // tp,
            d_expert=self.d_expert // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.n_kv_heads` and `parallel.tp`: one must be a multiple of the other.

        `model.n_heads` must be a multiple of `model.n_kv_heads`.
        """
        yield from self.unequal_parts(tp)
        yield from self.broken_mixture_rules(tp)
        if self.n_kv_heads % tp and tp % self.n_kv_heads:
            yield (
                f"model.n_kv_heads={self.n_kv_heads} and parallel.tp={tp}: one must be a multiple "
                f"of the other, so that each device has whole key/value heads, or a copy of one."
            )
        if self.n_heads % self.n_kv_heads:
            yield (
                f"model.n_heads={self.n_heads} must be a multiple of model.n_kv_heads="
                f"{self.n_kv_heads}: query heads share key/value heads in equal groups."
            )
        yield from self.broken_rotary_rules(self.head_size)
