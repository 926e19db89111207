"""What commands that use a trained model share: devices and processes."""

from collections.abc import Sequence

from jaxpipe.config import read_overrides
from jaxpipe.runtime import processes
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import use_cpu_devices, use_gpu_memory


def start_devices(overrides: Sequence[str]) -> None:
    """Make the devices of `runtime.cpu_devices`, or those that jax finds, available.

    The processes that are started are connected. Call it before jax is first used.

    Raises:
      ConfigError: there is no device.
      processes.NotMetError: the other processes do not connect.
    """
    count = read_overrides(overrides).get("runtime", {}).get("cpu_devices", 0)
    if isinstance(count, int) and count > 0:
        use_cpu_devices(count)
    use_gpu_memory()
    processes.join()
    check_devices()
