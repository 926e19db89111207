"""Sizes of a decoder that looks up n-grams, and the rules between them."""

from collections.abc import Iterator
from typing import Self

from msgspec.structs import replace

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.family import Count, ModelFamily, Positive

NGRAM = "ngram_"  # prefix of the kinds of layers that look up n-grams
ORDERS = 2, 3  # tokens of an n-gram


class EngramConfig(LlamaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Llama in which some layers add embeddings of the last 2 and 3 tokens.

    It shows how a layer reads tokens, and has neither Engram's convolution, nor its merged tokens.
    """

    family: str = "engram"
    ngram_layers: tuple[Count, ...] = (1,)  # layers that look up n-grams; 0 is the first
    ngram_heads: Positive = 4  # tables for n-grams of 2 tokens, and as many for 3, in each layer
    ngram_rows: Positive  # rows of a table; n-grams of equal hashes share a row
    ngram_width: Positive  # width of a row

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "n_kv_heads": 1, "d_ff": 8}
        >>> EngramConfig(**sizes, n_layers=2, ngram_rows=16, ngram_width=4).layer_kinds
        ('layer', 'ngram_layer')
        """
        kinds = enumerate(super().layer_kinds)
        return tuple(NGRAM + kind if i in self.ngram_layers else kind for i, kind in kinds)

    def of_kind(self, kind: str) -> Self:
        """The same configuration as layers of a kind read it: their own window and wavelengths."""
        return super().of_kind(kind.removeprefix(NGRAM))

    @property
    def tokens_before(self) -> int:
        """Number of tokens before each that its layers read."""
        return max(ORDERS) - 1

    @property
    def has_cache(self) -> bool:
        """Generation computes all tokens again: a cache has no tokens."""
        return False

    @property
    def ngram_tables(self) -> int:
        """Number of tables in a layer."""
        return len(ORDERS) * self.ngram_heads

    @property
    def _ngram_matrices(self) -> int:
        """Number of parameters of the matrices that read what all layers look up."""
        return len(self.ngram_layers) * 2 * self.ngram_tables * self.ngram_width * self.d_model

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        tables = self.ngram_tables * self.ngram_rows * self.ngram_width
        own = len(self.ngram_layers) * (tables + 2 * self.d_model)
        return super()._parameters(experts) + self._ngram_matrices + own

    def flops_per_token(self, seq_len: int) -> int:
        """As of a Llama, and 6 per parameter of the further matrices; a look-up is free."""
        return super().flops_per_token(seq_len) + 6 * self._ngram_matrices

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        return replace(super().part(tp), ngram_heads=self.ngram_heads // tp)

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Sizes of a layer's products on one of `tp` devices, by the settings that give them."""
        width = self.ngram_tables // tp * self.ngram_width
        return super().product_sizes(tp) | {
            "2 model.ngram_heads / parallel.tp x model.ngram_width": width
        }

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`.

        `model.ngram_layers` must be one or more different numbers below `model.n_layers`.

        `model.ngram_heads` must be a multiple of `parallel.tp`.
        """
        yield from super().broken_rules(tp)
        layers = set(self.ngram_layers) & set(range(self.n_layers))
        if not layers or len(layers) < len(self.ngram_layers):
            yield (
                f"model.ngram_layers={list(self.ngram_layers)} must be one or more different "
                f"numbers below model.n_layers={self.n_layers}: change them, or take "
                f"model.family=llama, which looks up none."
            )
        if self.ngram_heads % tp:
            yield (
                f"model.ngram_heads={self.ngram_heads} must be a multiple of parallel.tp={tp}: "
                f"devices that share a layer have equally many whole tables; change one."
            )


ENGRAM = ModelFamily(
    "engram", EngramConfig, {}, model="jaxpipe.model.families.engram.decoder:EngramDecoder"
)
