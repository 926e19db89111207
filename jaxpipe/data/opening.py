"""From a path to the shards that it stands for: a file, a folder of files, or a pattern."""

import glob
from pathlib import Path

from jaxpipe.config import ConfigError
from jaxpipe.data.documents import ShardedDocuments, all_documents
from jaxpipe.data.tokens import WHOLE, open_tokens

_SUFFIXES = (".bin", ".npy")


def open_documents(path: str, vocab_size: int) -> ShardedDocuments:
    """Open the files of token ids that a path stands for, in the order of their names.

    Raises `ConfigError` where there is none, or one is faulty.
    """
    files = _files(path)
    whole = sum(file.stat().st_size for file in files) <= WHOLE
    shards = [open_tokens(file, vocab_size, whole=whole) for file in files]
    return all_documents(shards, vocab_size, path)


def _files(path: str) -> list[Path]:
    """The files of a path that hold token ids."""
    if glob.has_magic(path) and not Path(path).exists():
        found = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
        files = [file for file in found if file.suffix in _SUFFIXES]
        if not files:
            raise ConfigError(
                f"nothing that ends in {' or '.join(_SUFFIXES)} is named {path}: correct it in "
                f"[data]."
            )
        return files
    if Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise ConfigError(
                f"the folder {path} holds no file that ends in {' or '.join(_SUFFIXES)}: correct "
                f"its path in [data]."
            )
        return files
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(
            f"a token file ends in {' or '.join(_SUFFIXES)}, unlike {path}: convert it, or rename "
            f"it."
        )
    if not Path(path).is_file():
        raise ConfigError(f"the token file {path} does not exist: correct its path in [data].")
    return [Path(path)]
