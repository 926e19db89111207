"""Files on a disk, or in an object store: the only module that knows the difference.

A store has no rename, no append and no lock, and a folder is only a common beginning of names. So

- checkpoints are read and written in place, by Orbax and TensorStore, and a checkpoint is complete
  when its file `COMMIT` is there, which is written last and removed first;
- what a run logs goes to a folder on this machine, which is uploaded (`spool.py`);
- everything else that is read is copied to this machine once (`local_copy`), and what commands
  write is made here and uploaded when it is complete (`written`).

A path is a `pathlib.Path` on a disk, for which every function here does what `pathlib` does, and an
`etils.epath.Path` in a store. Errors of a store are raised as `OSError`, whatever its library is.
"""

import contextlib
import hashlib
import json
import os
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage.errors import as_os_errors, describe, retry
from jaxpipe.runtime.storage.object_stores import (
    MAGIC,
    PROBE,
    alone,
    fetch_files,
    file_system,
    infos,
    matches,
    state_of,
)
from jaxpipe.runtime.storage.writing import replace_atomically

AnyPath = Any  # `Path`, or `epath.Path`, which has the methods of `Path` that are used on it
COMMIT = "commit_success.txt"  # Orbax writes it into a complete checkpoint, after all other files


def open_path(text: str | os.PathLike[str]) -> AnyPath:
    """The path that a text names; nothing is read.

    >>> open_path("runs/a")
    PosixPath('runs/a')
    """
    text = os.fspath(text)
    if not is_address(text):
        return Path(text)
    file_system(text)
    from etils import epath  # imports fsspec, which a run on disks does not need

    return epath.Path(text)


def absolute(path: AnyPath) -> AnyPath:
    """The path itself in a store; the absolute path on a disk."""
    return path if is_address(path) else path.absolute()


def check_store(name: str, address: str) -> None:
    """Raise `ConfigError` if files cannot be written at an address.

    Args:
      name: of the setting, for the message.
      address: of a folder, which need not exist.
    """
    try:
        with as_os_errors():
            probe(open_path(address))
    except FileNotFoundError as error:
        fault = f"there is no bucket {address.split('/')[2]!r}; create it, or correct the address."
        raise ConfigError(f"{name}={address!r} cannot be written: {fault}") from error
    except OSError as error:
        what = f"{name}={address!r}"
        otherwise = (
            f"{what} cannot be written ({error.strerror}): give this process credentials that may "
            f"write there, by the variables or files of the store's own tools, and "
            f"AWS_ENDPOINT_URL for a store that is not Amazon's."
        )
        raise ConfigError(describe(error, what, otherwise)) from error


def probe(directory: AnyPath) -> None:
    """Create and remove a file in a directory, which is created if needed."""
    if is_address(directory):
        path = directory / f"{PROBE}{uuid.uuid4().hex}"
        write_whole(path, b"")
        with as_os_errors():
            return path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


def write_whole(path: AnyPath, content: bytes, *, synced: bool = False) -> None:
    """Write a file so that a reader finds all of it or nothing new; creates its folder.

    One process at a time may write a given file. `synced` waits until a disk has it, as a store
    always does.
    """
    if is_address(path):
        with as_os_errors():
            file_system(str(path)).pipe_file(str(path), content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path, shared=False, synced=synced) as file:
        file.write(content)


def open_binary(path: AnyPath) -> BufferedReader | FileIO:
    """Open a file for reading, without a buffer on a disk."""
    return path.open("rb") if is_address(path) else path.open("rb", buffering=0)


def modified(path: AnyPath) -> float:
    """When a file was last written [s since 1970], by the clock of its disk or store."""
    if is_address(path):
        with as_os_errors():
            return file_system(str(path)).modified(str(path)).timestamp()
    return path.stat().st_mtime


def size_of(path: AnyPath) -> int:
    """The bytes of a file."""
    if is_address(path):
        with as_os_errors():
            return file_system(str(path)).size(str(path))
    return path.stat().st_size


def folder_size(directory: str | os.PathLike[str]) -> int:
    """The bytes of all files below a directory or an address."""
    if is_address(directory):
        return sum(info["size"] for info in infos(os.fspath(directory)).values())
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def list_files(directory: AnyPath) -> list[str]:
    """Sorted names of all files below a directory, relative to it, with `/`.

    Raises `OSError` for a folder that cannot be read, also where it does not exist.
    """
    if is_address(directory):
        return sorted(infos(str(directory)))

    def fail(error: OSError) -> None:  # os.walk would treat an unreadable folder as empty
        raise error

    return sorted(
        (Path(folder) / name).relative_to(directory).as_posix()
        for folder, _, names in os.walk(directory, onerror=fail, followlinks=True)
        for name in names
    )


def remove_tree(path: AnyPath) -> None:
    """Remove a folder, on a disk as far as possible; in a store its `COMMIT` first."""
    if not is_address(path):
        return shutil.rmtree(path, ignore_errors=True)
    with as_os_errors():
        (path / COMMIT).unlink(missing_ok=True)
        path.rmtree(missing_ok=True)


def move_tree(path: AnyPath, target: AnyPath) -> None:
    """Give a folder another name.

    A store copies it, without moving bytes through this machine. If that is interrupted, the old
    folder has no `COMMIT`: it is a save that was not finished.
    """
    if not is_address(path):
        path.rename(target)
        return
    with as_os_errors():
        (path / COMMIT).unlink(missing_ok=True)
        for name in infos(str(path)):
            file_system(str(path)).cp_file(f"{path}/{name}", f"{target}/{name}")
        path.rmtree()


def upload(folder: Path, address: str, names: list[str]) -> None:
    """Copy files of a local folder to an address, in this order; raises `OSError`."""
    with as_os_errors():
        for name in names:
            file_system(address).put_file(str(folder / name), f"{address.rstrip('/')}/{name}")


def download(address: str, folder: Path, is_wanted: Callable[[str], bool] = bool) -> None:
    """Copy files below an address into a local folder, those whose names are wanted."""
    with as_os_errors():
        fetch_files(address, folder, {n: i for n, i in infos(address).items() if is_wanted(n)})


def local_copy(text: str | os.PathLike[str], is_wanted: Callable[[str], bool] = bool) -> Path:
    """The path itself on a disk; for an address the path of a copy on this machine.

    A folder is copied with all files below it, a file with the files beside it that differ in their
    suffix, and a pattern with what it matches. `is_wanted` chooses among the files of a folder, by
    their names below it. The copy stays in the user's cache directory and is used again as long as
    names, sizes and times in the store are the same. One that was interrupted goes on where it
    stopped.

    Raises:
      ConfigError: nothing is there, or it cannot be read.
    """
    text = os.fspath(text)
    if not is_address(text):
        return Path(text)
    text = text.rstrip("/")
    base, _, name = text.rpartition("/")
    while any(sign in base for sign in MAGIC):
        base, _, part = base.rpartition("/")
        name = f"{part}/{name}"
    try:
        with as_os_errors():
            found = matches(text, base)
        found = {n: of for n, of in found.items() if is_wanted(n.removeprefix(f"{name}/"))}
        if not found:
            raise ConfigError(f"{text} does not exist: correct the address.")
        listing = json.dumps([text, sorted((n, state_of(of)) for n, of in found.items())])
        copy = cache_folder("copies") / digest(listing)
        unfinished = copy.with_suffix(".partial")
        with alone(copy.with_suffix(".lock"), unfinished):
            if not copy.exists():
                fetch_files(base, unfinished, found)
                unfinished.rename(copy)
        return copy / name
    except OSError as error:
        otherwise = (
            f"{text} cannot be copied to this machine ({error.strerror}): see that it can be read "
            f"with this process's credentials, and that the disk has room."
        )
        raise ConfigError(describe(error, text, otherwise)) from error


@contextlib.contextmanager
def written(text: str | os.PathLike[str], last: str = "") -> Iterator[Path]:
    """Yield the path to write a folder to; one of an address is uploaded when the body is done.

    Args:
      text: the path or address. At an address nothing may be yet.
      last: the file that shows that the folder is complete; it is uploaded last.

    Raises:
      ConfigError: something is at the address, or it cannot be written.
    """
    text = os.fspath(text)
    if not is_address(text):
        yield Path(text)
        return
    check_store("the address", text)
    if infos(text):
        raise ConfigError(f"{text} exists and is not empty: choose another address.")
    with tempfile.TemporaryDirectory(dir=cache_folder("written")) as parent:
        folder = Path(parent) / posixpath.basename(text.rstrip("/"))
        yield folder
        names = sorted(list_files(folder), key=lambda name: (name == last, name))
        try:
            for file in names:
                retry(partial(upload, folder, text, [file]), text)
        except OSError as error:
            raise ConfigError(f"{text} cannot be written ({error.strerror}).") from error


def digest(text: str) -> str:
    """A short name for a text, in hex digits.

    Names and fingerprints are of BLAKE2b, which no two texts share by chance; many of them are kept
    in manifests and checkpoints. Checksums of arrays are of XXH3, which is several times faster.
    """
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def user_cache() -> Path:
    """jaxpipe's folder in the user's cache directory; `ConfigError` where the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpipe"
    except RuntimeError as error:
        raise ConfigError("the user has no home directory: set XDG_CACHE_HOME.") from error


def cache_folder(name: str) -> Path:
    """A folder of the user's cache directory, which is created."""
    folder = user_cache() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
