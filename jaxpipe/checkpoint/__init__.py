"""Checkpoints whose form on disk does not depend on the layout of a run."""

from jaxpipe.checkpoint.exclusion import Exclusion
from jaxpipe.checkpoint.integrity import FORMAT, DamagedError
from jaxpipe.checkpoint.keying import Keying
from jaxpipe.checkpoint.store import Checkpoints, newest, read_state

__all__ = ["FORMAT", "Checkpoints", "DamagedError", "Exclusion", "Keying", "newest", "read_state"]
