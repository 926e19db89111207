"""Counts and rules of decoders in which a recurrence mixes the tokens of some layers."""

from collections.abc import Iterator
from typing import ClassVar

from msgspec.structs import fields

from jaxpipe.model.layers.moe.config import MixtureConfig

LINEAR = "linear_"  # prefix of the kinds of layers that have a recurrence in the place of attention


def is_linear(kind: str) -> bool:
    """Whether layers of a kind mix tokens by a recurrence instead of attention."""
    return kind.startswith(LINEAR)


class HybridConfig(MixtureConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder whose `linear_` layers have a recurrence.

    A family's class derives from this one, then from that of its layers with attention.

    Attributes:
      UNREAD: beginnings of the names of settings that no layer reads.
    """

    UNREAD: ClassVar[tuple[str, ...]] = ("sliding_window", "global_every")

    @property
    def linear_layers(self) -> int:
        """Number of layers with a recurrence."""
        return sum(map(is_linear, self.layer_kinds))

    @property
    def recurrent_matrices(self) -> int:
        """Number of parameters in the matrices of one layer's recurrence."""
        raise NotImplementedError

    @property
    def recurrent_vectors(self) -> int:
        """Number of parameters in the convolutions, norms and decays of one layer's recurrence."""
        raise NotImplementedError

    @property
    def recurrent_flops(self) -> int:
        """Model FLOPs per token with one layer's state: 6 per number and product."""
        raise NotImplementedError

    @property
    def mixer_matrices(self) -> int:
        """Number of parameters in the matrices of attention and of recurrences."""
        return self._of_layers(super().mixer_matrices, self.recurrent_matrices)

    @property
    def mixer_vectors(self) -> int:
        """Number of parameters in the vectors of attention and of recurrences."""
        return self._of_layers(super().mixer_vectors, self.recurrent_vectors)

    def _of_layers(self, as_attention: int, of_linear: int) -> int:
        """Sum over layers, given that of all layers if they had attention, and a linear layer's."""
        linear = self.linear_layers
        return as_attention // self.blocks * (self.blocks - linear) + of_linear * linear

    def flops_per_token(self, seq_len: int) -> int:
        """As without recurrences in layers with attention, and `recurrent_flops` in the others."""
        keys = 6 * self.n_heads * (self.head_size + self.value_size) * seq_len
        saved = self.linear_layers * (self.recurrent_flops - keys)
        return super().flops_per_token(seq_len) + saved

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.sliding_window` must be left out in models with a recurrence, and so must the
        settings of positions in those whose attention has none.
        """
        yield from super().broken_rules(tp)
        for field in fields(type(self)):
            value = getattr(self, field.name)
            if field.name.startswith(self.UNREAD) and value != field.default:
                yield (
                    f"model.{field.name}={value!r} has no effect in models of the family "
                    f"{self.family!r}: leave it out."
                )
