"""The processes of a run: how they find each other, and what they have to agree on.

With one process everything here does nothing. Importing this module does not import jax.
"""

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime.coordination import SILENT_SECONDS, Service, Watch


class NotMetError(Exception):
    """The other processes of the run did not come."""


_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_met: list[Watch] = []  # none, or the one watch of this process once it has met the others


def join() -> None:
    """Meet the other processes, if this one was started as one of several.

    They are found from JAX_COORDINATOR_ADDRESS (`host:port` of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or from what Slurm (`srun`) and Open MPI tell their tasks. Call before the first
    use of a device. Raises `ConfigError` where one of the three is missing or no number, and
    `NotMetError` where the others do not come.
    """
    places = _places()
    if places is None:
        return
    import jax

    # It would take SIGTERM for itself, also before anybody asks it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # jax aborts where it misses a process: the watch comes before it, with a sentence.
        jax.distributed.initialize(**places, heartbeat_timeout_seconds=3 * SILENT_SECONDS)
    except (RuntimeError, ValueError) as error:
        raise NotMetError(
            f"the processes of this run did not meet ({first_line(error)}): start all of them, "
            f"with the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES."
        ) from error
    service = Service()
    if service.count > 1:
        _met.append(Watch(service))
        _met[0].start()
        _met[0].take_aborts()


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
    if not several():
        yield
        return
    service = _met[0].service
    if not first():
        service.gather(name, "")
    try:
        yield
    finally:
        if first():
            service.gather(name, "")


def several() -> bool:
    """Whether this is one of several processes that have met."""
    return bool(_met)


def largest(value: int) -> int:
    """The largest of the processes' values, on each of them."""
    return max(map(int, _met[0].service.gather("largest", str(value)))) if several() else value


def devices_of_host() -> int:
    """Devices of the host that has fewest, over all processes that run there."""
    import jax

    own = jax.local_device_count()
    if not several():
        return own
    devices: Counter[str] = Counter()
    for value in _met[0].service.gather("hosts", json.dumps([socket.gethostname(), own])):
        host, count = json.loads(value)
        devices[host] += count
    return min(devices.values())


def check_alike(name: str, parts_of: Callable[[], Mapping[str, str]]) -> None:
    """Compare what all processes must have alike: texts by name.

    All call it. Raises `ConfigError`, on all of them, that names the first part in which a process
    differs from the first one: together they would wait for ever, or compute nonsense.
    """
    if not several():
        return
    service, parts, reason = _met[0].service, parts_of(), ""
    theirs = json.loads(service.from_first(f"jaxpipe/alike/{name}", json.dumps(parts)))
    for part in {**theirs, **parts}:
        own, first_has = (has.get(part, "nothing") for has in (parts, theirs))
        if own != first_has:
            reason = (
                f"the processes of this run differ in {part}: {own} in process {service.index}, "
                f"{first_has} in process 0; start all with the same command, files and versions."
            )
            break
    if reason := next(filter(None, service.gather(name, reason)), ""):
        raise ConfigError(reason)


def stops_after(step: int, received: int) -> int:
    """The signal for which the run stops after this step, or 0; one process alone has received it.

    Of several as `Watch.reached`.
    """
    return _met[0].reached(step, received) if several() else received


def finish() -> None:
    """Meet the others at the end of the run."""
    if several():
        _met[0].finish()


def leave(code: int, sentence: str) -> NoReturn:
    """End this one of several processes at once, with a sentence, and the others because of it."""
    _met[0].leave(code, sentence)


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
