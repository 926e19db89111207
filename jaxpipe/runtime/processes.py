"""The processes of a run: how they find each other, and what they have to agree on.

With one process everything here does nothing. Importing this module does not import jax.
"""

import contextlib
import functools
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxpipe.config import ConfigError, first_line

HEARTBEAT_SECONDS = 30  # without a sign of life of a process until the others give up
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join() -> None:
    """Meet the other processes, if this one was started as one of several.

    They are found from JAX_COORDINATOR_ADDRESS (`host:port` of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or from what Slurm (`srun`) and Open MPI tell their tasks. Call before the first
    use of a device. Raises `ConfigError` where one of the three is missing or no number, or the
    others do not come.
    """
    places = _places()
    if places is None:
        return
    import jax

    try:
        jax.distributed.initialize(**places, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of this run did not meet ({first_line(error)}): start all of them, "
            f"with the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES."
        ) from error


def started() -> int:
    """How many processes this run was started with, as far as its environment says."""
    places = _places()
    if places:
        return places["num_processes"]
    return 1 if places is None else max(_tasks())


def first() -> bool:
    """Whether this is the process that prints and writes logs."""
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def first_before_others(name: str) -> Iterator[None]:
    """The first process runs the body alone, the others after it."""
    import jax
    from jax.experimental import multihost_utils

    several = jax.process_count() > 1
    if several and not first():
        multihost_utils.sync_global_devices(name)
    try:
        yield
    finally:
        if several and first():
            multihost_utils.sync_global_devices(name)


def largest(value: int) -> int:
    """The largest of the processes' values, on each of them."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def largest_soon(value: Callable[[], int]) -> Callable[[], int]:
    """`largest` without waiting: the result is there once the devices did what they had to do.

    Several processes ask for their values now. A single one asks for its own, which takes no time,
    when its result is called. Raises `JaxRuntimeError`, now or then, where another process is gone.
    """
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return value
    sharding, compiled = _compiled_largest()
    values = jax.make_array_from_process_local_data(sharding, np.array([value()], np.int32))
    try:
        most = compiled(values)
    except ValueError as error:  # so small a program runs on a CPU at once, where another is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error
    return lambda: int(most)


@functools.cache
def _compiled_largest() -> tuple[Any, Any]:
    """How one value of every process is put, and the compiled maximum over them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    of_process = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([of_process[index] for index in sorted(of_process)]), ("process",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(lambda values: values.max(), out_shardings=everywhere)
    return NamedSharding(mesh, PartitionSpec("process")), compiled


def devices_of_host() -> int:
    """Devices of the host that has fewest, over all processes that run there."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return jax.local_device_count()
    own = np.uint32([zlib.crc32(socket.gethostname().encode()), jax.local_device_count()])
    hosts, counts = multihost_utils.process_allgather(own).T
    return int(min(counts[hosts == host].sum() for host in set(hosts.tolist())))


def _places() -> dict[str, Any] | None:
    """Arguments for jax that say who is where: none where jax finds out; None for one process."""
    given = {name: os.environ.get(name) for name in _NAMES}
    if given["JAX_COORDINATOR_ADDRESS"] is None:
        return {} if max(_tasks()) > 1 else None
    try:
        count, index = (int(given[name] or "") for name in _NAMES[1:])
        if not 0 <= index < count:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"JAX_COORDINATOR_ADDRESS={given[_NAMES[0]]} needs JAX_NUM_PROCESSES and "
            f"JAX_PROCESS_ID below it, but they are {given[_NAMES[1]]} and {given[_NAMES[2]]}: set "
            f"all three, or none."
        ) from None
    return {
        "coordinator_address": given[_NAMES[0]],
        "num_processes": count,
        "process_id": index,
    }


def _tasks() -> list[int]:
    """How many tasks a launcher says it started."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return [int(os.environ.get(name, "1")) for name in names]
