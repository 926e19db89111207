"""Checksums that prove that a checkpoint on disk is the one that was saved.

`state/checksums*.xxh128` lists a checksum of every file below `state/`, and the metadata contains a
checksum of itself. They are written before the checkpoint gets its final name: each process reads
its own files back, which are still in its host's page cache. A reader compares the checksums before
it reads any array, so a failure after that is no damage. `xxhsum -c checksums*.xxh128` does the
same by hand.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import position
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.errors import as_os_errors
from jaxpipe.runtime.storage.files import AnyPath

Meta = dict[str, Any]
FORMAT = 2  # incremented when the keys on disk change (`disk_keys.py`)
_KEY = "xxh3_128"  # metadata entry: the checksum of all other entries
_THREADS, _READERS = 8, "checksums"
_BLOCK = 1 << 20  # bytes read at once; smaller blocks cost a third more time


class DamagedError(Exception):
    """A checkpoint is proved to differ from what was saved; the message names the difference."""


def add_checksum(meta: Meta) -> Meta:
    """The metadata with its checksum added, which also marks that the arrays have checksums.

    >>> sorted(add_checksum({"step": 7, "config": "lr = 0.1"}))
    ['config', 'step', 'xxh3_128']
    """
    rest = {name: value for name, value in meta.items() if name != _KEY}
    return rest | {_KEY: _checksum_of(json.loads(json.dumps(rest)))}


def has_checksums(meta: Meta) -> bool:
    """Whether the checkpoint has checksums; earlier versions wrote none."""
    return _KEY in meta


def is_as_written(meta: Meta) -> bool:
    """Whether metadata has the checksum that `add_checksum` gave it."""
    rest = {name: value for name, value in meta.items() if name != _KEY}
    return meta.get(_KEY) == _checksum_of(rest)


def read_meta(checkpoint: AnyPath) -> Meta:
    """Read a checkpoint's metadata and compare it with its checksum, if it has one.

    Raises `DamagedError` where it is missing, not a JSON object or changed, and `ConfigError` for a
    newer format.
    """
    try:
        with as_os_errors():
            content = (checkpoint / "meta" / "metadata").read_bytes()
        meta = json.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError("its metadata is missing") from error
    except ValueError as error:  # no JSON, or not even text
        raise DamagedError(f"its metadata is not JSON: {first_line(error)}") from error
    if not isinstance(meta, dict):
        raise DamagedError("its metadata is no JSON object")
    if has_checksums(meta) and not is_as_written(meta):
        raise DamagedError("its metadata is not as it was saved")
    version = meta.get("format")
    if not isinstance(version, int):
        raise DamagedError("its metadata names no format")
    if version > FORMAT:
        raise ConfigError(
            f"checkpoint {checkpoint} has format {version} but this jaxpipe reads formats up to "
            f"{FORMAT}: install a newer jaxpipe."
        )
    if not has_checksums(meta) and any((checkpoint / "state").glob("checksums*")):
        raise DamagedError("its metadata has lost its checksum")
    return meta


def write_checksums(directory: AnyPath, process: int | None = None) -> None:
    """Write the checksums of the files below `state/` that one process wrote.

    `process` None selects the files that belong to no process.
    """
    files = [
        name
        for name in _list_files(directory)
        if not _is_checksum_list(name) and _writing_process(name) == process
    ]
    lines = [f"{checksum}  {name}\n" for name, checksum in _checksums(directory, files)]
    of = "" if process is None else f".process_{process}"
    # Orbax syncs the arrays: a power loss must not lose only this file.
    path = directory / f"checksums{of}.xxh128"
    storage.write_whole(path, "".join(lines).encode(), synced=True)


def check_files(directory: AnyPath, process: int = 0, count: int = 1) -> int:
    """Compare this process's share of the files below `state/` with their checksums.

    If the number of processes is the same as at the save, each process compares the files that it
    wrote. Under the same layout it reads these files next and then finds them in the page cache.

    Args:
      directory: the `state/` directory.
      process: the index of this process.
      count: the number of processes.

    Returns:
      The number of files below `state/`, of all processes, without the checksum lists.

    Raises:
      DamagedError: a file is missing, changed, or has no checksum.
      OSError: a file cannot be read.
    """
    try:
        found = _list_files(directory)
    except FileNotFoundError as error:
        raise DamagedError(f"{first_line(error)}") from error
    want = {}
    for name in filter(_is_checksum_list, found):
        for line in filter(
            None, (directory / name).read_bytes().decode(errors="replace").split("\n")
        ):
            checksum, _, listed = line.partition("  ")
            want[listed] = checksum
    held = [name for name in found if not _is_checksum_list(name)]
    if not want:
        raise DamagedError("the checksums of state/ are missing")
    if missing := sorted(want.keys() - set(held)):
        raise DamagedError(f"state/{missing[0]} is missing")
    if unlisted := [name for name in held if name not in want]:
        raise DamagedError(f"state/{unlisted[0]} has no checksum")
    files = [name for name in held if (_writing_process(name) or 0) % count == process]
    for name, checksum in _checksums(directory, files):
        if checksum != want[name]:
            raise DamagedError(f"state/{name} is not as it was saved")
    return len(held)


@contextlib.contextmanager
def succeed_on_all_processes(
    group: Group, checkpoint: AnyPath, checked: bool = True
) -> Iterator[None]:
    """Make the body, which all processes of a group execute, succeed on all of them or on none.

    Raises `DamagedError` on all processes if one of them has proof of damage, and `ConfigError` for
    any other failure to read: memory, permissions, another format, a bug. If the checksums of the
    checkpoint were not `checked`, a file that cannot be decoded also is proof of damage.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: this process must still meet the others below
        problem = error
        if not checked and not isinstance(error, ConfigError) and _is_damage(error):
            problem = DamagedError(first_line(error))
            problem.__cause__ = error
    damage = problem if isinstance(problem, DamagedError) else None
    worst = group.largest("reading of a checkpoint", 2 if damage else int(problem is not None))
    if worst == 2:
        raise damage or DamagedError("another process found it damaged")
    cause = group.cause_in_all("reading of a checkpoint", problem)
    if isinstance(problem, ConfigError):
        raise problem
    if worst:
        reason = (
            f"{type(problem).__name__}: {first_line(problem)}" if problem else "by another process"
        )
        raise ConfigError(
            f"checkpoint {checkpoint} cannot be read ({reason}), which does not show that it is "
            f"damaged: nothing was changed; remove the cause, or take another checkpoint."
        ) from cause


def _checksum_of(meta: Meta) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(meta, sort_keys=True).encode())


def _list_files(directory: AnyPath) -> list[str]:
    """Relative paths below `state/` of the files that need a checksum and of the checksum lists."""
    named = ((path, path.rpartition("/")[2]) for path in storage.list_files(directory))
    return [path for path, name in named if name != storage.COMMIT and not name.startswith(".")]


def _is_checksum_list(name: str) -> bool:
    return re.fullmatch(r"checksums(\.process_\d+)?\.xxh128", name) is not None


def _writing_process(name: str) -> int | None:
    """The process that wrote a file, by Orbax's folder name; None: a file for all processes."""
    match = re.match(r"ocdbt\.process_(\d+)/", name)
    return int(match[1]) if match else None


def _checksums(directory: AnyPath, names: list[str]) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(_THREADS, _READERS) as threads:
        return list(zip(names, threads.map(lambda name: checksum_of_file(directory / name), names)))


def are_compared() -> bool:
    """Whether files of a checkpoint are being read for their checksums."""
    return any(thread.name.startswith(_READERS) for thread in threading.enumerate())


def checksum_of_file(path: AnyPath) -> str:
    """The XXH128 checksum of a file, in hex digits."""
    checksum, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with storage.open_binary(path) as file:
        while size := file.readinto(block):
            checksum.update(block[:size])
            position.beat()
    return checksum.hexdigest()


def _is_damage(error: BaseException | None) -> bool:
    """Whether an error of Orbax or TensorStore shows that files are missing or not decodable."""
    if error is None:
        return False
    kinds = (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError)
    message = str(error).startswith(("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE"))
    return isinstance(error, kinds) or message or _is_damage(error.__cause__ or error.__context__)
