"""Expert parallelism as a model sees it: how tokens reach experts on other devices.

Neighbouring replicas may hold an equal shard of the experts of every sparse layer, and send each
token to the devices that hold its experts (Lepikhin et al. 2020, "GShard"). The devices along tp
either share the width of each of these experts, or hold different ones, too (`over_tp`). This
module has the case of a device that holds all experts; `jaxpipe.core.mesh.ExpertParallel` is the
case of several.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AllExperts:
    """A device that holds all experts of its layers, so that it sends nothing.

    Attributes:
      size: number of devices that share the experts.
      room: rows that a device can send to each of the `size` devices, as a multiple of the mean
        load; 0: the worst case, so that nothing overflows.
      over_tp: whether the devices along tp are among the `size` devices. Each then holds whole
        experts, and sends only its own tokens of a stream that is sharded along the sequence
        (`OneDevice.sequence`).
      per_host: consecutive devices of one host, to which a token is sent once; 1: a token is sent
        straight to the devices of its experts.
    """

    size: int = 1
    room: float = 0.0
    over_tp: bool = False
    per_host: int = 1

    @property
    def between_hosts(self) -> "AllExperts":
        """One device of each host, which exchange what is for any device of their hosts."""
        return self

    @property
    def in_host(self) -> "AllExperts":
        """The devices of a host."""
        return self

    def exchange(self, rows: Any) -> Any:
        """All-to-all of `[size, ...]`: block i goes to device i; results are in device order."""
        return rows


ALL_EXPERTS = AllExperts()
