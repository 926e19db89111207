"""Checkpoints that know nothing of the layout they were saved under."""

from jaxpipe.checkpoint.keying import Keying
from jaxpipe.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "Keying"]
