"""The devices that a run is planned for, present or not. Importing this imports no jax."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxpipe.config import Config
from jaxpipe.planning.cost.machine import Hardware, machine_of
from jaxpipe.runtime.devices import DEVICES, data_sheet_of, device_memory

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
      platform: a `jax.Device.platform`, such as "cpu" or "gpu".
      count: number of devices; None: none is present, and a mesh may have any number.
      per_host: number of devices of one host; None: not known.
      per_process: number of devices of one process, which a run takes all or none of.
      memory: of one device [bytes]; None: not known.
      capability: compute capability of GPUs, 9.0 for an H100; None: not known.
      hardware: the data sheet and the links by which ops are costed.
      are_present: whether they are jax's devices here, not ones that a plan assumes.
    """

    platform: str = "gpu"
    count: int | None = None
    per_host: int | None = None
    per_process: int = 1
    memory: float | None = DEVICES["H100"].memory
    capability: float | None = None
    hardware: Hardware = field(default_factory=Hardware)
    are_present: bool = False

    @classmethod
    def planned(cls, config: Config) -> "Devices":
        """Devices for a configuration while none is present: virtual CPU devices, or H100s."""
        return cls(platform="cpu", memory=None) if config.runtime.cpu_devices else cls()

    @classmethod
    def present(
        cls, devices: Sequence["jax.Device"], per_host: int | None = None, per_process: int = 1
    ) -> "Devices":
        """These devices of jax, which are all of one kind."""
        first = devices[0]
        capability = getattr(first, "compute_capability", None)
        return cls(
            platform=first.platform,
            count=len(devices),
            per_host=per_host,
            per_process=per_process,
            memory=device_memory(first.device_kind),
            capability=None if capability is None else float(capability),
            hardware=machine_of(data_sheet_of(first.device_kind) or "H100"),
            are_present=True,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs, on which collectives block and ranks share cores."""
        return self.platform == "cpu"
