"""The model: Flax layers and plain maths, on one device."""

from jaxpipe.model.decoder import Decoder
from jaxpipe.model.loss import IGNORE

__all__ = ["IGNORE", "Decoder"]
