"""Which processes of a run have come to the meeting, for the case that not all do, or one twice.

`jax.distributed` then aborts those that have come, after five minutes and with a message that names
nobody. Before they have met, processes share nothing but the run directory.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from jaxpipe.runtime import processes
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.directory import remove_with_folders
from jaxpipe.runtime.storage.errors import as_os_errors

SECONDS = 280.0  # until the others are given up; jax aborts at 300
_FOLDER = "arrived"  # in the run directory
_REFUSED = "refused"  # file with the reason why a process does not let the others meet
_LOOK_SECONDS = 1.0
_LINGER = 5.0  # seconds for which that file is there


@contextlib.contextmanager
def arriving(directory: storage.AnyPath) -> Iterator[None]:
    """Show the others that this process has come, while the body (`processes.join`) runs.

    If the body takes too long, the process exits with code 3 and a sentence that names those that
    have not come; its file stays for those that give up later. If another process has come with the
    same index, all exit with code 3 within seconds. Otherwise nothing stays in the run directory.
    With a single process it does nothing.

    Raises:
      NotMetError: this is process 0, and its port is in use, perhaps by another process 0; the
        others exit with that reason.
    """
    meeting = processes.meeting()
    if meeting is None:
        yield
        return
    folder = directory / _FOLDER / meeting.name
    own, over = folder / str(meeting.index), threading.Event()
    mark = f"{socket.gethostname()} {secrets.token_hex(8)}"
    try:
        storage.write_whole(own, mark.encode())
    except OSError:  # on a full disk nothing is compared
        mark = ""
    if meeting.index == 0 and (reason := processes.port_fault()):
        known = _refuse(folder, f"process 0 has ended: {reason}")
        remove_with_folders(own, directory.parent)
        raise processes.NotMetError(known or reason)
    threading.Thread(target=_wait, args=(folder, meeting, mark, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        remove_with_folders(own, directory.parent)


def _refuse(folder: storage.AnyPath, sentence: str) -> str:
    """Let the others exit with a sentence too: those that have come, and come within seconds.

    Returns the sentence of another process that refuses meanwhile; "" if none does.
    """
    path, known = folder / _REFUSED, sentence
    with contextlib.suppress(OSError):
        storage.write_whole(path, sentence.encode())
    time.sleep(_LINGER)
    with contextlib.suppress(OSError), as_os_errors():
        known = path.read_text()
    remove_with_folders(path, folder)
    return known if known != sentence else ""


def _wait(
    folder: storage.AnyPath, meeting: processes.Meeting, mark: str, over: threading.Event
) -> None:
    """Exit if a process gives a reason, if one has this one's index, or if some do not come."""
    end, own = time.monotonic() + SECONDS, folder / str(meeting.index)
    while not over.wait(min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))):
        # First, since a second process 0 also refuses, for its port, without knowing why.
        if sentence := _doubled(own, meeting, mark):
            _refuse(folder, sentence)
            return _exit(sentence)
        if sentence := _reason(folder, own):
            return _exit(sentence)
        if time.monotonic() >= end:
            return _give_up(folder, meeting)


def _doubled(own: storage.AnyPath, meeting: processes.Meeting, mark: str) -> str:
    """A sentence if another process has put its mark into this one's file; "" if none has."""
    found = mark
    with contextlib.suppress(OSError), as_os_errors():
        found = own.read_text()
    if not mark or found == mark:
        return ""
    hosts = " and ".join(text.partition(" ")[0] for text in (mark, found))
    return (
        f"two processes of {meeting.name} were started with index {meeting.index} "
        f"(JAX_PROCESS_ID), on {hosts}: give each of the {meeting.count} an index of its own, from "
        f"0 to {meeting.count - 1}."
    )


def _reason(folder: storage.AnyPath, own: storage.AnyPath) -> str:
    """Why a process of this start refuses, as a sentence; "" if none does."""
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
        came |= {int(path.name): path.read_text().partition(" ")[0] for path in files}
    missing = [str(index) for index in range(meeting.count) if index not in came]
    listed = ", ".join(f"{index} (on {host})" for index, host in sorted(came.items()))
    sentence = (
        f"of {meeting.count} processes {listed} have come to {meeting.name} within {SECONDS:.0f} "
        f"s, but not {', '.join(missing) or 'all to the same address'}: start all of them, with "
        f"the same JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and run.dir."
    )
    _exit(sentence)


def _exit(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"error: {sentence}\n".encode())
    os._exit(ExitCode.OTHERS_GONE)
