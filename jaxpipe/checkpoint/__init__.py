"""Checkpoints that know nothing of the layout they were saved under."""

from jaxpipe.checkpoint.exclusion import Exclusion
from jaxpipe.checkpoint.keying import Keying
from jaxpipe.checkpoint.store import FORMAT, Checkpoints, newest, read_state

__all__ = ["FORMAT", "Checkpoints", "Exclusion", "Keying", "newest", "read_state"]
