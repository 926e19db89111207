"""The one way to write a file on a disk so that a reader finds all of it or nothing new.

Not written by it, each for its reason: records that are appended (`directory.AppendedFile`); the
watchdog's reports, which are overwritten in place since a full disk has no room for a second file;
and folders, which are renamed as a whole (`checkpoint.hf.safetensors_directory`).
"""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replace_atomically(
    path: Path, *, shared: bool = True, synced: bool = True
) -> Iterator[BinaryIO]:
    """Open a temporary file in the same folder, which replaces `path` once it is complete.

    A link with the temporary file's name is not followed.

    Args:
      path: of the file; its folder exists.
      shared: several processes, also of several hosts, may write at the same time: the last one
        wins. Otherwise the temporary file's name is fixed, so that the next write removes what a
        process that was killed has left.
      synced: wait until the disk has the content, which then survives a power loss.
    """
    ending = f"{uuid.uuid4().hex}.tmp" if shared else "new"
    unfinished = path.with_name(f"{path.name}.{ending}")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the error of the write counts
            unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
