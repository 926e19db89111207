"""Object stores by fsspec: listings, and copies of files that go on where they stopped."""

import contextlib
import errno
import fcntl
import functools
import os
import posixpath
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jaxpipe.runtime import position
from jaxpipe.runtime.connections import bytes_to_stores
from jaxpipe.runtime.storage.errors import as_os_errors, retry

MAGIC = "*?["
PROBE = ".probe-"  # begins the name of a file that is removed at once; no other process reads it
_THREADS = 8  # files that are copied at a time
_BLOCK = 8 << 20  # bytes read from a store at once
_LOOK_SECONDS = 0.5  # between two looks whether another process has finished a copy


def file_system(address: str) -> Any:
    """The file system of fsspec for an address."""
    return _open(address.partition("://")[0])


@functools.cache
def _open(scheme: str) -> Any:
    import fsspec

    # A listing that is kept would not show what other processes write.
    fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
    with as_os_errors():
        return fsspec.filesystem(scheme)


def infos(address: str) -> dict[str, dict[str, Any]]:
    """What the store tells of every file below an address, by its name relative to it."""
    files = file_system(address)
    with as_os_errors():
        root = files._strip_protocol(address)
        found = files.find(root, detail=True)
    infos = {posixpath.relpath(name, root): info for name, info in found.items() if name != root}
    return {name: info for name, info in infos.items() if not name.startswith(PROBE)}


def matches(text: str, base: str) -> dict[str, dict[str, Any]]:
    """The files that a text names, and those beside them that differ in their suffix."""
    files = file_system(text)
    root, above = files._strip_protocol(text), files._strip_protocol(base)
    has_magic = any(sign in text for sign in MAGIC)
    found: dict[str, dict[str, Any]] = {}
    for match in files.glob(root) if has_magic else [root]:
        if below := {n: i for n, i in files.find(match, detail=True).items() if n != match}:
            found |= below
            continue
        stem = posixpath.splitext(match)[0] if files.exists(match) else match
        found |= files.glob(f"{stem}.*", detail=True)
        if files.isfile(match):
            found[match] = files.info(match)
    return {posixpath.relpath(n, above): i for n, i in found.items() if i["type"] == "file"}


def state_of(info: dict[str, Any]) -> list[str]:
    """What changes when a file in a store is written again."""
    return [str(info.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime")]


def fetch_files(address: str, folder: Path, found: dict[str, dict[str, Any]]) -> None:
    """Copy files below an address into a local folder, several at a time.

    A file that is there in part goes on where it ends, so `found` must be what it was when the copy
    began.

    Args:
      address: of the folder.
      folder: is created.
      found: what the store tells of each file (`infos`), by its name below the address.
    """
    moved = partial(bytes_to_stores, python=True)  # blocks of a slow store take long
    with position.metered(moved), ThreadPoolExecutor(_THREADS) as threads:
        copies = [
            threads.submit(_fetch, f"{address.rstrip('/')}/{name}", folder / name, info.get("size"))
            for name, info in found.items()
        ]
        try:
            for copy in copies:
                copy.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _fetch(address: str, path: Path, size: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = file_system(address)
    if size is None:
        retry(lambda: files.get_file(address, str(path)), address)
        return
    with path.open("ab") as file:
        if file.tell() > size:
            file.truncate(0)
        for begin in range(file.tell(), size, _BLOCK):
            read = partial(_read, address, begin, min(begin + _BLOCK, size))
            file.write(retry(read, address))
            file.flush()
            position.beat()


def _read(address: str, begin: int, end: int) -> bytes:
    content = file_system(address).cat_file(address, start=begin, end=end)
    if len(content) != end - begin:
        raise OSError(errno.EIO, f"{address} ends before byte {end}")
    return content


@contextlib.contextmanager
def alone(lock: Path, copy: Path) -> Iterator[None]:
    """Let one process of this machine at a time run the body, which writes to `copy`.

    Those that wait for it make progress as long as it does.
    """
    with lock.open("w") as file:
        before = -1
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                size = _bytes_below(copy)
                if size != before:
                    position.beat()
                before = size
                time.sleep(_LOOK_SECONDS)
        yield


def _bytes_below(folder: Path) -> int:
    """The bytes of all files below a folder, of which another process may rename any."""
    size = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(base, name)).st_size
    return size
