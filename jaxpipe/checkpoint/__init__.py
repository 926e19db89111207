"""Checkpoints that know nothing of the layout they were saved under."""

from jaxpipe.checkpoint.exclusion import Exclusion
from jaxpipe.checkpoint.integrity import FORMAT, DamagedError
from jaxpipe.checkpoint.keying import Keying
from jaxpipe.checkpoint.store import Checkpoints, newest, read_state

__all__ = ["FORMAT", "Checkpoints", "DamagedError", "Exclusion", "Keying", "newest", "read_state"]
