"""A folder at an address that is made here piece by piece, and continued after an interruption."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage.errors import as_os_errors, retry
from jaxpipe.runtime.storage.files import (
    cache_folder,
    check_store,
    digest,
    download,
    list_files,
    upload,
)
from jaxpipe.runtime.storage.object_stores import alone, file_system, infos

_PERIOD = 5.0  # seconds between looks for files that are finished


@contextlib.contextmanager
def remote_output(
    text: str | os.PathLike[str], last: str, journal: str, is_unfinished: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yield the folder to write to: the path itself, or one of this machine for an address.

    Finished files are uploaded while the body runs. An interrupted folder is continued from what
    this machine has, or else from what the store has; of a complete one only `last` is copied.

    Args:
      text: the path or address.
      last: the file that shows that the folder is complete; it is uploaded last.
      journal: the file that lists what is finished, as long as the folder is not complete.
      is_unfinished: whether a file is being written.

    Raises:
      ConfigError: other files are at the address, or it cannot be written.
    """
    text = os.fspath(text).rstrip("/")
    if not is_address(text):
        yield Path(text)
        return
    check_store("the address", text)
    folder = cache_folder("written") / digest(text) / text.rpartition("/")[2]
    with alone(folder.parent.with_suffix(".lock"), folder):
        try:
            there, uploads = infos(text), _Uploads(folder, text, last, journal, is_unfinished)
            if not folder.exists():
                folder.mkdir(parents=True)
                if last in there:
                    download(text, folder, last.__eq__)
                elif journal in there:
                    download(text, folder)
                elif there:
                    raise ConfigError(f"{text} exists and is not empty: choose another address.")
                uploads.note_all()
            with uploads.in_background():
                yield folder
            uploads.upload_all()
        except OSError as error:
            raise ConfigError(f"{text} cannot be written ({error.strerror}).") from error
        shutil.rmtree(folder.parent)


class _Uploads:
    def __init__(
        self, folder: Path, address: str, last: str, journal: str,
        is_unfinished: Callable[[Path], bool],
    ):  # fmt: skip
        self._folder, self._address, self._ends = folder, address, (journal, last)
        self._is_unfinished, self._over = is_unfinished, threading.Event()
        self._record = folder.parent / "uploaded.json"  # state of the files in the store, by name
        self._uploaded: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._uploaded = json.loads(self._record.read_text())

    def note_all(self) -> None:
        """Note that the store has all files of the folder."""
        for name in list_files(self._folder):
            self._uploaded[name] = _state(self._folder / name)

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Upload files as they are finished while the body runs."""
        thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def upload_all(self) -> None:
        """Upload what is left, and then remove from the store what the folder has no more."""
        self._upload(wait=True)
        with as_os_errors():
            for name in set(infos(self._address)) & {self._ends[0], *self._uploaded}:
                if not (self._folder / name).exists():
                    file_system(self._address).rm_file(f"{self._address}/{name}")

    def _work(self) -> None:
        while not self._over.wait(_PERIOD):
            with contextlib.suppress(OSError):  # the next time, or at the end
                self._upload(wait=False)

    def _upload(self, *, wait: bool) -> None:
        def one(name: str) -> None:
            upload(self._folder, self._address, [name])

        for name in sorted(list_files(self._folder), key=self._order):
            path = self._folder / name
            with contextlib.suppress(FileNotFoundError):  # it is renamed or removed
                state = _state(path)
                if self._is_unfinished(path) or self._uploaded.get(name) == state:
                    continue
                retry(partial(one, name), self._address) if wait else one(name)
                self._uploaded[name] = state
                self._record.write_text(json.dumps(self._uploaded))

    def _order(self, name: str) -> tuple[int, str]:
        return (1 + self._ends.index(name) if name in self._ends else 0), name


def _state(path: Path) -> list[int]:
    return [path.stat().st_mtime_ns, path.stat().st_size]
