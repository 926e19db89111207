"""Checks of sources: no file twice or in both splits, and pairs only where they are read."""

from collections.abc import Sequence
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.manifest import read_manifest
from jaxpipe.data.shards.token_files import find_bare_files, find_prepared_folders


def check_disjoint(
    to_train_on: Sequence[ShardedDocuments], held_out: Sequence[ShardedDocuments]
) -> None:
    """Raise `ConfigError` for a file that is trained on twice, or both trained on and held out.

    Hard and symbolic links count as the same file; a held-out file may not be a copy either.
    """
    files: dict[tuple[int, int], Path] = {}
    digests: dict[str, Path] = {}
    for shard in (shard for documents in to_train_on for shard in documents.shards):
        status = shard.path.stat()
        if other := files.get(file := (status.st_dev, status.st_ino)):
            raise ConfigError(
                f"{shard.path} is to be trained on twice, also as {other}: name a file once in "
                f"[data], and give its source a larger weight if it is to be seen more often."
            )
        files[file] = digests[shard.digest] = shard.path
    for shard in (shard for documents in held_out for shard in documents.shards):
        status = shard.path.stat()
        other = files.get((status.st_dev, status.st_ino)) or digests.get(shard.digest)
        if other:
            name = "" if other == shard.path else f", as {other}"
            raise ConfigError(
                f"data.heldout_path names {shard.path}, which is also trained on{name}: take it "
                f"out of what is trained on, or leave data.heldout_path out."
            )


def check_records(path: str, *, in_pairs: bool) -> None:
    """Raise `ConfigError` unless all that a path names are pairs, or nothing is."""
    folders = find_prepared_folders(path)
    if in_pairs and not (folders and all(read_manifest(folder).pairs for folder in folders)):
        raise ConfigError(
            f"train.loss='dpo' reads pairs, but {path} is no folder that `python -m jaxpipe.data "
            f"prepare --pairs` wrote: prepare it so."
        )
    if in_pairs and (others := find_bare_files(path)):
        raise ConfigError(
            f"train.loss='dpo' reads pairs, but {path} also names {others[0]}, no prepared "
            f"folder: name the folders alone."
        )
    if not in_pairs and any(read_manifest(folder).pairs for folder in folders):
        raise ConfigError(
            f"{path} has pairs of answers, and training on both as text would teach the rejected "
            f"ones too: set train.loss=dpo, or prepare it without --pairs."
        )
