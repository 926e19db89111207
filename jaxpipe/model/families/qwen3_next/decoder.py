"""A decoder with gated delta networks, whose last layer may predict further tokens."""

from dataclasses import dataclass

from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig
from jaxpipe.model.prediction.decoder import PredictingDecoder
from jaxpipe.model.recurrent.decoder import DeltaDecoder


@dataclass(frozen=True)
class Qwen3NextDecoder(DeltaDecoder, PredictingDecoder):
    """A decoder whose `linear_` layers have a `GatedDeltaNetwork`, and predictions attention."""

    config: Qwen3NextConfig
