"""Checkpoints whose form on disk does not depend on the layout of a run."""

from jaxpipe.checkpoint.exclusion import Exclusion
from jaxpipe.checkpoint.integrity import FORMAT, DamagedError
from jaxpipe.checkpoint.keying import StateKeying
from jaxpipe.checkpoint.listing import find_newest
from jaxpipe.checkpoint.restoring import read_state
from jaxpipe.checkpoint.store import CheckpointStore

__all__ = [
    "FORMAT",
    "CheckpointStore",
    "DamagedError",
    "Exclusion",
    "StateKeying",
    "find_newest",
    "read_state",
]
