"""The processes of a run: how they find each other, and how they end together.

With one process every function here does nothing. What they agree on is in `group.py`. Importing
this module does not import jax.
"""

import contextlib
import errno
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime.coordination import SILENT_SECONDS, Service, Watch
from jaxpipe.runtime.group import Group


class NotMetError(Exception):
    """The other processes of the run did not connect."""


@dataclass(frozen=True)
class Meeting:
    """Where processes meet, as a file name; this process's index; the number of processes."""

    name: str
    index: int
    count: int


_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_met: list[Watch] = []  # empty, or the one watch of this process after `join`


def join() -> None:
    """Connect to the other processes, if this one was started as one of several.

    They are found from JAX_COORDINATOR_ADDRESS (`host:port` of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or from the variables that Slurm (`srun`) and Open MPI set. Call it before a
    device is first used.

    Raises:
      ConfigError: only some of the three variables are set, or one is no number.
      NotMetError: the other processes do not connect.
    """
    places = _places()
    if places is None:
        return
    import jax

    # Otherwise jax installs its own handler for SIGTERM, even if the service is never used.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # jax aborts without a message when a heartbeat is missing: a long timeout lets the watch
        # notice first and report it.
        with _without_proxies():
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


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hide proxies from gRPC, which would ask them for the hosts of this run."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if "_proxy" in name.lower()}
    try:
        yield
    finally:
        os.environ.update(hidden)


def port_fault() -> str:
    """Why process 0 cannot listen where the others meet; "" if it can, or jax chooses the port.

    jax itself would often crash.
    """
    places = _places()
    if not places:
        return ""
    address = places["coordinator_address"]
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{address.rpartition(':')[2]}"
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    try:
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        number = int(port)
        kind = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            if kind == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
            probe.listen()
    except (OSError, ValueError, OverflowError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            return ""  # jax says what is wrong with it
        return (
            f"port {port} of JAX_COORDINATOR_ADDRESS={address} is in use on this host, "
            f"{socket.gethostname()}, perhaps by an earlier start that has not ended: start again, "
            f"or choose another port"
        )
    return ""


def meeting() -> Meeting | None:
    """Where the processes of this run meet, according to its environment; None: a single one."""
    if places := _places():
        name, count, index = places.values()
        return Meeting(name.replace("/", "-"), index, count)
    names = {
        "SLURM": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        "OMPI": ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    }
    for launcher, (job, index, count) in names.items():
        if places is not None and int(os.environ.get(count, "1")) > 1 and index in os.environ:
            name = f"{launcher}-{os.environ.get(job, '')}".replace("/", "-")
            return Meeting(name, int(os.environ[index]), int(os.environ[count]))
    return None


def started() -> int:
    """Number of processes that this run was started with, according to its environment."""
    places = _places()
    if places:
        return places["num_processes"]
    return 1 if places is None else max(_tasks())


def first() -> bool:
    """Whether this is process 0, which prints and writes logs."""
    import jax

    return jax.process_index() == 0


def group() -> Group:
    """The processes of this run, for calls that all make together."""
    return Group(_met[0].service if _met else None)


def several() -> bool:
    """Whether this is one of several connected processes."""
    return bool(_met)


def post(key: str, text: str) -> None:
    """Leave a text of this process under a key for the others, in place of the one before."""
    if several():
        service = _met[0].service
        service.client.key_value_set(f"{key}/{service.index}", text, allow_overwrite=True)


def posted(key: str) -> dict[int, str]:
    """The texts under a key by process; without those of processes that have left none yet."""
    return _met[0].service.numbered(key) if several() else {}


def devices_of_host() -> int:
    """Number of devices per host (the smallest over hosts), counting all processes of a host."""
    import jax

    own = jax.local_device_count()
    if not several():
        return own
    devices: Counter[str] = Counter()
    for value in group().gather("hosts", json.dumps([socket.gethostname(), own])):
        host, count = json.loads(value)
        devices[host] += count
    return min(devices.values())


def devices_of_process() -> int:
    """Number of devices that a smaller run takes together, those of a process.

    It is 1 with a single process, which may use any of them, and that of all if processes differ.
    """
    import jax

    if not several():
        return 1
    counts = list(map(int, group().gather("devices", str(jax.local_device_count()))))
    return counts[0] if len(set(counts)) == 1 else sum(counts)


def go_on_with(count: int, reason: str) -> bool:
    """Go on with the first `count` processes alone; returns whether this one is among them.

    Nothing happens where these are all of them. Otherwise all leave jax's coordination service,
    whose number of processes is fixed, and those that go on start the same command anew: the call
    does not return there. The others print the reason. All call it, before they share anything.
    """
    if not several() or count == _met[0].service.count:
        return True
    import jax

    from jaxpipe.core.jax_internals import distributed_state

    index, address = _met[0].service.index, distributed_state().coordinator_address
    finish()
    _met.clear()
    jax.distributed.shutdown()
    if index >= count:
        print(f"process {index} is not needed: {reason}", flush=True)
        return False
    os.environ |= dict(zip(_NAMES, (address, str(count), str(index))))
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)


def stops_after(step: int, wanted: int) -> int:
    """The exit code with which the run stops after this step, or 0 (`Watch.reached`).

    With a single process this is `wanted`, the code with which it shall stop.
    """
    return _met[0].reached(step, wanted) if several() else wanted


def watch() -> Watch | None:
    """The thread that reads events of the other processes; None with a single process."""
    return _met[0] if several() else None


def place() -> tuple[int, int]:
    """The index of this process, and the number of processes."""
    service = _met[0].service if several() else None
    return (service.index, service.count) if service else (0, 1)


def finish() -> None:
    """Wait for the other processes at the end of the run."""
    if several():
        _met[0].finish()


def leave(code: int, sentence: str) -> NoReturn:
    """Exit this process at once with a message, and make the others exit."""
    if several():
        _met[0].leave(code, sentence)
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"error: {sentence}\n".encode())
    os._exit(code)


def _places() -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`; empty if jax finds them, None for one process."""
    given = [os.environ.get(name) for name in _NAMES]
    if given == [None] * len(_NAMES):
        return {} if max(_tasks()) > 1 else None
    try:
        address, (count, index) = given[0], (int(number or "") for number in given[1:])
        if not (address and 0 <= index < count):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"one of several processes needs JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and a "
            f"JAX_PROCESS_ID below that, but they are {given[0]}, {given[1]} and {given[2]}: set "
            f"all three, or none."
        ) from None
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def _tasks() -> list[int]:
    """Numbers of tasks according to the variables of each launcher."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    return [int(os.environ.get(name, "1")) for name in names]
