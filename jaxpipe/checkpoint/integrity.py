"""Checksums: what proves that a checkpoint on disk is the one that was saved.

Every file below `state/` has a checksum in `state/checksums*.xxh128`, and the metadata one of its
own contents. They are written before the checkpoint gets its name, each process reading back its
own files, which are still in its host's memory. A reader compares them before it reads any array,
so whatever fails afterwards is no damage. `xxhsum -c checksums.xxh128` compares them by hand.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import processes

Meta = dict[str, Any]
FORMAT = 1  # raised when the keys on disk change
_KEY = "xxh3_128"  # in the metadata: the checksum of all its other entries
_ADDED_LATER = "commit_success.txt"  # by Orbax, once all else is there; nobody reads it
_THREADS = 8


class DamagedError(Exception):
    """Proof that a checkpoint is not as it was saved; the message says what is wrong with it."""


def sealed(meta: Meta) -> Meta:
    """The metadata with its own checksum, which also says that its arrays have checksums.

    >>> sorted(sealed({"step": 7, "config": "lr = 0.1"}))
    ['config', 'step', 'xxh3_128']
    """
    rest = {name: value for name, value in meta.items() if name != _KEY}
    return rest | {_KEY: _checksum_of(json.loads(json.dumps(rest)))}


def has_checksums(meta: Meta) -> bool:
    """Whether checksums prove what the checkpoint holds; earlier versions wrote none."""
    return _KEY in meta


def read_meta(checkpoint: Path) -> Meta:
    """The metadata of a checkpoint, compared with its checksum if it has one.

    Raises `DamagedError` where it is missing, no JSON object, or another than was saved, and
    `ConfigError` for a later format.
    """
    try:
        meta = json.loads((checkpoint / "meta" / "metadata").read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError("its metadata is missing") from error
    except ValueError as error:  # no JSON, or not even text
        raise DamagedError(f"its metadata is not JSON: {first_line(error)}") from error
    if not isinstance(meta, dict):
        raise DamagedError("its metadata is no JSON object")
    written = meta.get(_KEY)
    rest = {name: value for name, value in meta.items() if name != _KEY}
    if written is not None and written != _checksum_of(rest):
        raise DamagedError("its metadata is not as it was saved")
    version = meta.get("format")
    if not isinstance(version, int):
        raise DamagedError("its metadata names no format")
    if version > FORMAT:
        raise ConfigError(
            f"checkpoint {checkpoint} has format {version} but this jaxpipe reads formats up to "
            f"{FORMAT}: install a newer jaxpipe."
        )
    if written is None and any((checkpoint / "state").glob("checksums*")):
        raise DamagedError("its metadata has lost its checksum")
    return meta


def write_checksums(directory: Path, process: int | None = None) -> None:
    """Write the checksums of what one process wrote below `state/`, or of all other files."""
    own = [name for name in _files(directory) if not _is_list(name) and _writer(name) == process]
    lines = [f"{checksum}  {name}\n" for name, checksum in _checksums(directory, own)]
    of = "" if process is None else f".process_{process}"
    with (directory / f"checksums{of}.xxh128").open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())  # as the arrays are: it must not be lost where they are not


def check_files(directory: Path, process: int = 0, count: int = 1) -> int:
    """Compare one of `count` processes' share of the files below `state/`; return how many exist.

    With as many processes as saved, one compares the files that it wrote: those that it
    reads next, unless its layout is another, so that its host has them in memory. Raises
    `DamagedError` for a file that is missing, changed, or has no checksum, and `OSError` for one
    that cannot be read.
    """
    try:
        found = _files(directory)
    except FileNotFoundError as error:
        raise DamagedError(f"{first_line(error)}") from error
    want = {}
    for name in filter(_is_list, found):
        for line in filter(None, (directory / name).read_text(errors="replace").split("\n")):
            checksum, _, listed = line.partition("  ")
            want[listed] = checksum
    held = [name for name in found if not _is_list(name)]
    if not want:
        raise DamagedError("the checksums of state/ are missing")
    if missing := sorted(want.keys() - set(held)):
        raise DamagedError(f"state/{missing[0]} is missing")
    if unlisted := [name for name in held if name not in want]:
        raise DamagedError(f"state/{unlisted[0]} has no checksum")
    own = [name for name in held if (_writer(name) or 0) % count == process]
    for name, checksum in _checksums(directory, own):
        if checksum != want[name]:
            raise DamagedError(f"state/{name} is not as it was saved")
    return len(held)


@contextlib.contextmanager
def all_processes_read(checkpoint: Path, checked: bool = True) -> Iterator[None]:
    """The body, on all processes of the run alike, succeeds on all of them or on none.

    Raises `DamagedError` on all where one process has proof of damage, and `ConfigError` for any
    other reason not to read: memory, permissions, another format, a fault of the program. Of a
    checkpoint whose checksums were not `checked`, files that cannot be decoded are proof too.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other processes must not wait for this one
        problem = error
        if not checked and not isinstance(error, ConfigError) and _shows_damage(error):
            problem = DamagedError(first_line(error))
            problem.__cause__ = error
    damaged = isinstance(problem, DamagedError)
    worst = processes.largest(2 if damaged else int(problem is not None))
    if worst == 2:
        raise problem if damaged else DamagedError("another process found it damaged")
    if isinstance(problem, ConfigError):
        raise problem
    if worst:
        reason = (
            f"{type(problem).__name__}: {first_line(problem)}" if problem else "by another process"
        )
        raise ConfigError(
            f"checkpoint {checkpoint} cannot be read ({reason}), which does not show that it is "
            f"damaged: nothing was changed; remove the cause, or take another checkpoint."
        ) from problem


def _checksum_of(meta: Meta) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(meta, sort_keys=True).encode())


def _files(directory: Path) -> list[str]:
    """The paths below `state/` of all files that have a checksum, or should have, and of lists."""

    def fail(error: OSError) -> None:  # a folder that may not be read is not an empty one
        raise error

    return sorted(
        (Path(folder) / name).relative_to(directory).as_posix()
        for folder, _, names in os.walk(directory, onerror=fail, followlinks=True)
        for name in names
        if name != _ADDED_LATER and not name.startswith(".")
    )


def _is_list(name: str) -> bool:
    return re.fullmatch(r"checksums(\.process_\d+)?\.xxh128", name) is not None


def _writer(name: str) -> int | None:
    """The process into whose folder Orbax had a file written; None: what the first adds for all."""
    match = re.match(r"ocdbt\.process_(\d+)/", name)
    return int(match[1]) if match else None


def _checksums(directory: Path, names: list[str]) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(zip(names, threads.map(lambda name: _checksum(directory / name), names)))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _shows_damage(error: BaseException | None) -> bool:
    """Whether an error of Orbax or TensorStore says that files are missing or not decodable."""
    if error is None:
        return False
    kinds = (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError)
    said = str(error).startswith(("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE"))
    return isinstance(error, kinds) or said or _shows_damage(error.__cause__ or error.__context__)
