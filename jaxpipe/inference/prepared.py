"""Scores beside the tokens of a prepared folder. Importing this imports no jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.manifest import MANIFEST, FolderManifest, find_manifest
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.runtime.storage.errors import remedy_of
from jaxpipe.runtime.storage.writing import replace_atomically, sync_folder

REFERENCE = "reference"  # ending of the files with scores, by which training finds them


@dataclass(frozen=True)
class PreparedFolder:
    """A folder that `python -m jaxpipe.data prepare` wrote.

    Attributes:
      path: the folder.
      manifest: what it holds.
    """

    path: Path
    manifest: FolderManifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder; raises `ConfigError` where it was not prepared, or not completely."""
        manifest = find_manifest(path)
        if manifest is None:
            raise ConfigError(
                f"{path} has no {MANIFEST}: give a folder that `python -m jaxpipe.data prepare` "
                f"wrote, a .npy or a .jsonl."
            )
        return cls(path, manifest)

    @cached_property
    def sequences(self) -> list[np.ndarray]:
        """The ids of every document, int32 `[tokens]`."""
        documents = self._documents
        return [documents.tokens(number) for number in range(self.manifest.documents)]

    def write(self, name: str, values: Sequence[np.ndarray]) -> None:
        """Write float32 values of every document beside its tokens, into files `SHARD.<name>`.

        Args:
          name: ending of the files.
          values: of the tokens of every document but its first, which gets 0.

        Raises `ConfigError` where a file cannot be written.
        """
        every = [np.concatenate([np.zeros(1), one]).astype("<f4") for one in values]
        begin = 0
        for shard in self.manifest.shards:
            path = self.path / f"{shard.name}.{name}"
            try:
                with replace_atomically(path) as file:
                    file.write(np.concatenate(every[begin : begin + shard.documents]).tobytes())
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be written ({error.strerror}): {remedy_of(error, str(path))}."
                ) from error
            begin += shard.documents
        sync_folder(self.path)

    @property
    def _documents(self) -> ShardedDocuments:
        return open_documents(str(self.path), self.manifest.largest_id + 1)
