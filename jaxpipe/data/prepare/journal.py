"""The journal of a folder that is being prepared, the folder's lock, and its end.

The journal lists the complete shards, so that a killed run can continue.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.manifest import (
    JOURNAL,
    MANIFEST,
    FolderManifest,
    HistogramBin,
    ShardEntry,
    find_manifest,
    read_manifest,
)
from jaxpipe.runtime.storage.writing import replace_atomically, sync_folder
from jaxpipe.tokenizer.files import TokenizerFiles

_SHARD = re.compile(r"\d{6,}\.(bin|idx|mask)")
_UNFINISHED = re.compile(r".+\.[0-9a-f]{32}\.tmp")  # see `replace_atomically`


class PieceResult(msgspec.Struct, frozen=True):
    """The result of a piece: a line of the journal."""

    piece: int
    key: str  # see `_key`
    shard: ShardEntry | None  # None: the piece had no document
    histogram: tuple[HistogramBin, ...]
    longest: int  # tokens of the longest document
    empty: int  # documents without text
    bad: int  # documents that could not be read
    unlearned: int = 0  # documents without a token that counts in the loss
    chats: int = 0  # records with messages
    date: str = ""  # that the chat template took for the present


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; a folder created here and left empty is removed."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Unlike `lockf`, which locks only what is open for writing, it can lock the folder itself.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{folder} is being prepared by another process: wait for it.") from error
    finally:
        os.close(handle)
        for path in created:
            with suppress(OSError):  # the folder is not empty
                path.rmdir()


@contextmanager
def open_journal(
    folder: Path, keys: list[str], skip_bad: bool
) -> Iterator[tuple[FileIO, dict[int, PieceResult]]]:
    """Open the journal for appending; also yields the pieces that it lists, by number.

    The journal is deleted when the body succeeds. After a `ConfigError` without any shard all files
    that were written here are deleted.
    """
    done = {d.piece: d for d in _read_journal(folder) if d.piece < len(keys)}
    done = {n: d for n, d in done.items() if d.key == keys[n] and (skip_bad or not d.bad)}
    whole = {f"{number:06d}" for number in done}
    for path in folder.iterdir():
        if is_unfinished(path) or (_SHARD.fullmatch(path.name) and path.stem not in whole):
            path.unlink(missing_ok=True)  # a worker of a killed run may remove its own file first
    with replace_atomically(folder / JOURNAL) as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in done.values())
    with (folder / JOURNAL).open("ab", buffering=0) as journal:
        try:
            yield journal, done
        except ConfigError:
            if not any(one.shard for one in done.values()):
                for path in folder.iterdir():
                    if is_unfinished(path) or _SHARD.fullmatch(path.name) or path.name == JOURNAL:
                        path.unlink(missing_ok=True)
            raise
    (folder / JOURNAL).unlink()


def read_date(folder: Path) -> str:
    """Return the date with which a folder was begun, which a continued preparation keeps; or ""."""
    if (folder / JOURNAL).exists() or not (folder / MANIFEST).exists():
        return next((one.date for one in _read_journal(folder)), "")
    return read_manifest(folder).date


def read_finished(folder: Path, origin: str) -> FolderManifest | None:
    """Return the manifest of a complete folder, or None where there is work to do.

    Raises `ConfigError` where the folder was prepared from other inputs or has other files.
    """
    if (folder / JOURNAL).exists() and not (folder / MANIFEST).exists():
        return None
    if (manifest := find_manifest(folder)) and manifest.origin == origin:
        (folder / JOURNAL).unlink(missing_ok=True)
        return manifest
    if manifest or not all(map(is_unfinished, folder.iterdir())):
        raise ConfigError(
            f"{folder} already holds what was prepared of others: remove it, or give another --out."
            if manifest
            else f"{folder} already holds other files: give another --out."
        )
    return None


def complete_folder(folder: Path, manifest: FolderManifest, known: TokenizerFiles) -> None:
    """Write the tokenizer's files and the manifest, which make the folder complete."""
    for name, content in known.contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with replace_atomically(folder / name) as file:
            file.write(content)
    with replace_atomically(folder / MANIFEST) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    sync_folder(folder)


def is_unfinished(file: Path) -> bool:
    """Whether a killed run has left this file of a folder in the middle of writing it."""
    return bool(_UNFINISHED.fullmatch(file.name))


def _read_journal(folder: Path) -> Iterator[PieceResult]:
    """Yield the lines of the journal up to the first incomplete one."""
    if (folder / JOURNAL).exists():
        for line in (folder / JOURNAL).read_bytes().splitlines():
            try:
                yield msgspec.json.decode(line, type=PieceResult)
            except msgspec.DecodeError:
                return
