"""Which processes of a run have come to the meeting, for the case that some never do.

`jax.distributed` then aborts those that have come, after five minutes and with a message that names
nobody. Before they have met, processes share nothing but the run directory.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from jaxpipe.runtime import processes
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.directory import remove_with_folders
from jaxpipe.runtime.storage.errors import as_os_errors

SECONDS = 280.0  # until the others are given up; jax aborts at 300
_FOLDER = "arrived"  # in the run directory
_REFUSED = "refused"  # file with the reason why process 0 does not let the others meet
_LOOK_SECONDS = 1.0
_LINGER = 5.0  # seconds for which that file is there


@contextlib.contextmanager
def arriving(directory: storage.AnyPath) -> Iterator[None]:
    """Show the others that this process has come, while the body (`processes.join`) runs.

    If the body takes too long, the process exits with code 3 and a sentence that names those that
    have not come; its file stays for those that give up later. Otherwise nothing stays in the run
    directory. With a single process it does nothing.

    Raises:
      NotMetError: this is process 0, and its port is in use; the others exit with that reason.
    """
    meeting = processes.meeting()
    if meeting is None:
        yield
        return
    folder = directory / _FOLDER / meeting.name
    own, over = folder / str(meeting.index), threading.Event()
    with contextlib.suppress(OSError):
        storage.write_whole(own, socket.gethostname().encode())
    if meeting.index == 0 and (reason := processes.port_fault()):
        _refuse(folder, reason)
        remove_with_folders(own, directory.parent)
        raise processes.NotMetError(reason)
    threading.Thread(target=_wait, args=(folder, meeting, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        remove_with_folders(own, directory.parent)


def _refuse(folder: storage.AnyPath, reason: str) -> None:
    """Let the others exit with a reason too: those that have come, and come within seconds."""
    path = folder / _REFUSED
    with contextlib.suppress(OSError):
        storage.write_whole(path, reason.encode())
    time.sleep(_LINGER)
    remove_with_folders(path, folder)


def _wait(folder: storage.AnyPath, meeting: processes.Meeting, over: threading.Event) -> None:
    """Exit if process 0 gives a reason, or if the others do not come."""
    end = time.monotonic() + SECONDS
    while not over.wait(min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))):
        if meeting.index and (reason := _reason(folder, folder / str(meeting.index))):
            return _exit(f"process 0 has ended: {reason}")
        if time.monotonic() >= end:
            return _give_up(folder, meeting)


def _reason(folder: storage.AnyPath, own: storage.AnyPath) -> str:
    """Why process 0 of this start refuses; "" if it does not."""
    with contextlib.suppress(OSError), as_os_errors():
        if storage.modified(folder / _REFUSED) > storage.modified(own) - 3 * _LINGER:
            return (folder / _REFUSED).read_text()
    return ""


def _give_up(folder: storage.AnyPath, meeting: processes.Meeting) -> None:
    came, own = {meeting.index: socket.gethostname()}, folder / str(meeting.index)
    with contextlib.suppress(OSError), as_os_errors():
        # Files of an earlier start are older: its processes, too, waited so long before they left.
        oldest = storage.modified(own) - SECONDS
        found = [path for path in folder.iterdir() if path.name.isdecimal()]
        files = [path for path in found if storage.modified(path) > oldest]
        came |= {int(path.name): path.read_text() for path in files}
    missing = [str(index) for index in range(meeting.count) if index not in came]
    listed = ", ".join(f"{index} (on {host})" for index, host in sorted(came.items()))
    sentence = (
        f"of {meeting.count} processes {listed} have come to {meeting.name} within {SECONDS:.0f} "
        f"s, but not {', '.join(missing) or 'all to the same address'}: start all of them, with "
        f"the same JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and run.dir."
    )
    _exit(sentence)


def _exit(sentence: str) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"error: {sentence}\n".encode())
    os._exit(ExitCode.OTHERS_GONE)
