"""What commands that use a trained model share: devices, processes and exit codes."""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from jaxpipe.config import ConfigError, first_line, read_overrides
from jaxpipe.runtime import processes
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import use_cpu_devices, use_gpu_memory
from jaxpipe.schedule import ScheduleError


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


def exit_code(command: Callable[[], None]) -> int:
    """Run a command, in every process of it, and return its exit code, with a message if not 0.

    It is 0 if the command is done, 2 with bad input, 3 where another process is missing, and 130
    after Ctrl-C. With several processes an error ends all of them.
    """
    try:
        command()
        processes.finish()
    except processes.NotMetError as error:
        code, message = 3, str(error)
    except (ConfigError, ScheduleError) as error:
        code, message = 2, str(error)
    except KeyboardInterrupt:
        code, message = 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        if not processes.several():
            raise
        traceback.print_exc()
        code, message = 1, first_line(error)
    else:
        return 0
    if processes.several():
        processes.leave(code, message)
    print(f"error: {message}", file=sys.stderr)
    return code
