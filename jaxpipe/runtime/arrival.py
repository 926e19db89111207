"""Which processes of a run have come to the meeting, for the case that some never do.

`jax.distributed` then aborts those that have come, after five minutes and with a message that names
nobody. Before they have met, processes share nothing but the run directory.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from jaxpipe.runtime import processes, storage
from jaxpipe.runtime.directory import remove_with_folders
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage_errors import as_os_errors

SECONDS = 280.0  # until the others are given up; jax aborts at 300
_FOLDER = "arrived"  # in the run directory


@contextlib.contextmanager
def arriving(directory: storage.AnyPath) -> Iterator[None]:
    """Show the others that this process has come, while the body (`processes.join`) runs.

    If the body takes too long, the process exits with code 3 and a sentence that names those that
    have not come; its file stays for those that give up later. Otherwise nothing stays in the run
    directory. With a single process it does nothing.
    """
    meeting = processes.meeting()
    if meeting is None:
        yield
        return
    folder = directory / _FOLDER / meeting.name
    own = folder / str(meeting.index)
    with contextlib.suppress(OSError):
        storage.write_whole(own, socket.gethostname().encode())
    timer = threading.Timer(SECONDS, _give_up, [folder, meeting])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        remove_with_folders(own, directory.parent)


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
    with contextlib.suppress(OSError):
        os.write(2, f"error: {sentence}\n".encode())
    os._exit(ExitCode.OTHERS_GONE)
