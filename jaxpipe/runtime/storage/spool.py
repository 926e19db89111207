"""The local folder of a run whose run.dir is in an object store, and its uploads.

Logs, reports of processes, stacks and profiles are appended to and overwritten, which a store does
not do. They are written to a folder on this machine, one for each process of the run, and changed
files are uploaded: in the background, before every save, and at the end.
"""

import contextlib
import os
import posixpath
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime import processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.directory import LOCK, WriteGuard
from jaxpipe.runtime.storage.errors import as_os_errors, describe, retry

_PERIOD = 15.0  # least seconds between uploads in the background
_SHARE = 20  # an upload takes at most one part in so many of the time
# What a start does not need: it is large, or is of the process that wrote it.
_STAYS = (
    "checkpoints", "exports", "imported", "profile", "hangs", "processes", "corruption",
    "tensorboard", "wandb",
)  # fmt: skip


def local_folder(run_dir: str) -> Path:
    """The folder on this machine for the files of a run: run.dir itself, if that is on a disk."""
    if not is_address(run_dir):
        return Path(run_dir)
    address, meeting = run_dir.rstrip("/"), processes.meeting()
    name = f"{posixpath.basename(address)}-{storage.digest(address)}"
    return storage.cache_folder("runs") / name / str(meeting.index if meeting else 0)


class Spool:
    """The folder of a run on this machine; a context manager around everything that writes there.

    It starts with what the store has, which is what counts: another machine may have gone on with
    the run. If run.dir is on a disk, `folder` is run.dir and nothing is uploaded.

    Attributes:
      folder: the folder; this run has its lock (`directory.locked`).
    """

    def __init__(self, run_dir: str, say: Callable[[str], None], group: Group):
        self._group = group
        self.folder = local_folder(run_dir)
        self._address = run_dir.rstrip("/") if is_address(run_dir) else ""
        self._guard = WriteGuard(say)
        self._uploaded: dict[str, tuple[int, int]] = {}  # time and size of files in the store
        self._uploads = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> "Spool":
        if self._address:
            reason = ""
            cause: Exception | None = None
            try:
                storage.check_store("run.dir", self._address)
                self._begin()
            except ConfigError as error:
                reason, cause = str(error), error
            except OSError as error:
                what, cause = f"run.dir={self._address!r}", error
                otherwise = f"{what} cannot be read ({error.strerror}): remove it."
                reason = describe(error, what, otherwise)
            self._group.refuse("copy of the run directory", reason, cause)
            threading.Thread(target=self._work, name="spool", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._address:
            with self._uploads, self._guard.attempt(self._address):
                retry(self._upload_changed, self._address, self._guard.say)

    def upload(self) -> None:
        """Upload the files that have changed; a failure is reported, and the next call repeats it.

        With a run.dir on a disk it does nothing.
        """
        if not self._address:
            return
        with self._uploads, self._guard.attempt(self._address):
            self._upload_changed()

    def _upload_changed(self) -> None:
        for name, state in self._files():
            if self._uploaded.get(name) != state:
                storage.upload(self.folder, self._address, [name])
                self._uploaded[name] = state

    def share(self, name: str, text: str) -> None:
        """Let the other machines read a small file now; nothing to do on a disk they share."""
        if self._address:
            storage.write_whole(self.shared / name, text.encode())

    def read_shared(self, folder: str) -> list[str]:
        """The texts of all .json files in a folder of the run directory, of all processes."""
        with as_os_errors():
            return [path.read_text() for path in (self.shared / folder).glob("*.json")]

    @property
    def shared(self) -> storage.AnyPath:
        """The run directory as all processes see it."""
        return storage.open_path(self._address or self.folder)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        def is_wanted(name: str) -> bool:
            return name.partition("/")[0] not in _STAYS

        fetch = partial(storage.download, self._address, self.folder, is_wanted)
        retry(fetch, self._address, self._guard.say)
        self._uploaded = dict(self._files())

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name in storage.list_files(self.folder):
            with contextlib.suppress(FileNotFoundError):  # removed, or renamed, in the meantime
                status = os.stat(self.folder / name)
                if name != LOCK and not name.endswith(".new"):  # of `write_whole`
                    yield name, (status.st_mtime_ns, status.st_size)

    def _work(self) -> None:
        pause = _PERIOD
        while not self._over.wait(pause):
            started = time.monotonic()
            self.upload()
            pause = max(_PERIOD, _SHARE * (time.monotonic() - started))
