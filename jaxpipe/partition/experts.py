"""Expert parallelism as a model sees it: which replicas have a layer's experts in parts.

Neighbouring replicas may have an equal part of every sparse layer's experts each, and send a token
to those that have its experts (Lepikhin et al. 2020, "GShard"). This module has the case of a
device that has all experts; `jaxpipe.parallel.ExpertParallel` is the other.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AllExperts:
    """A device that has all experts of its layers: nothing needs to be sent.

    `room` is how many rows a device can send to each of `size` devices, over the mean of what their
    tokens choose; 0: as many as there can be.
    """

    size: int = 1
    room: float = 0.0

    def exchange(self, rows: Any) -> Any:
        """Of `[size, ...]` the i-th part to device i; what comes back has theirs in order."""
        return rows


ALL_EXPERTS = AllExperts()
