"""Sizes of a GPT-2, and the rules between them."""

from collections.abc import Iterator
from typing import Self

from msgspec.structs import replace

from jaxpipe.model.decoder_config import DecoderConfig
from jaxpipe.model.family import Positive


class GPT2Config(DecoderConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a GPT-2, by preset or by size."""

    family: str = "gpt2"
    max_seq_len: Positive = 1024  # number of learned positions [tokens]

    @property
    def key_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_heads

    @property
    def tied(self) -> bool:
        """Whether the head is the transposed embedding: always."""
        return True

    @property
    def _matrices(self) -> int:
        """Number of parameters in matrix products, those of the layers and the head."""
        attention = 4 * self.d_model * self.n_heads * self.head_size
        layer = attention + 2 * self.d_model * self.d_ff
        return self.n_layers * layer + self.vocab_size * self.d_model

    def parameter_count(self) -> int:
        """Number of parameters, from the sizes alone."""
        d, heads = self.d_model, self.n_heads * self.head_size
        biases, norms = 3 * heads + d + self.d_ff + d, 2 * 2 * d
        vectors = self.n_layers * (biases + norms) + 2 * d
        return self._matrices + vectors + self.max_seq_len * d

    def flops_per_token(self, seq_len: int) -> int:
        """6 per matrix parameter and 12 L H K S of attention; look-ups are free."""
        return self.flops_of(self._matrices, keys=seq_len)

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(
            self.resolved(),
            n_heads=self.n_heads // tp,
            d_ff=self.d_ff // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`."""
        return self.unequal_parts(tp)
