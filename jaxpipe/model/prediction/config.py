"""What a number of further tokens to predict means for the layers and counts of a model."""

from typing import Annotated, Self

from msgspec import Meta
from msgspec.structs import replace

from jaxpipe.model.layers.moe.config import DENSE, SPARSE, MixtureConfig

PREDICTION = "prediction"  # the kind of the layer that predicts further tokens
Depth = Annotated[int, Meta(ge=0, le=16)]


class PredictingConfig(MixtureConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder that may predict further tokens.

    A family's class derives from this one, then from that of its other layers, and declares the
    fields `mtp_depth` and `mtp_weight`: msgspec allows fields in one of several base classes alone.
    """

    def for_inference(self, *, dropless: bool = True) -> Self:
        """The same model without predictions of further tokens."""
        return replace(super().for_inference(dropless=dropless), mtp_depth=0)

    @property
    def tokens_ahead(self) -> int:
        """Number of further tokens that each position predicts in training."""
        return self.mtp_depth

    @property
    def blocks(self) -> int:
        """Number of blocks of attention and MLP, or experts: layers, and depths of prediction."""
        return self.n_layers + self.mtp_depth

    @property
    def pipeline_layers(self) -> int:
        """Number of layers that pipeline stages are made of; all depths are the last one."""
        return len(self.layer_kinds)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer; the last predicts further tokens, if there are any."""
        return super().layer_kinds + (PREDICTION,) * (self.mtp_depth > 0)

    @property
    def block_kind(self) -> str:
        """The kind of the block that each depth of prediction has."""
        return SPARSE if self.n_experts else DENSE

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """The kind of every block, first of layers and then of depths."""
        return super().block_kinds[: self.n_layers] + (self.block_kind,) * self.mtp_depth

    @property
    def prediction_matrices(self) -> int:
        """Number of parameters of the matrices that merge the stream with a token ahead."""
        return self.mtp_depth * 2 * self.d_model**2

    @property
    def prediction_vectors(self) -> int:
        """Number of parameters of the norms of all depths, without those of their blocks."""
        return self.mtp_depth * 3 * self.d_model

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        own = self.prediction_matrices + self.prediction_vectors
        return super()._parameters(experts) + own

    def flops_per_token(self, seq_len: int) -> int:
        """As of its blocks, and 6 per parameter of merges and, for every depth, of the head."""
        heads = self.mtp_depth * self.vocab_size * self.d_model
        return super().flops_per_token(seq_len) + 6 * (self.prediction_matrices + heads)
