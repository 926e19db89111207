"""Open the token files that a path names: a file, a folder of files, or a glob pattern."""

import glob
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.input_files import is_compressed, unpacked_suffix
from jaxpipe.data.shards.documents import ShardedDocuments, TokenShard, check_ids
from jaxpipe.data.shards.indexed import Index, IndexedShard, describe_size_fault, open_indexed
from jaxpipe.data.shards.manifest import JOURNAL, MANIFEST, FolderManifest, find_manifest
from jaxpipe.data.shards.other_formats import (
    FAST_LLM,
    index_version,
    open_datatrove,
    open_fast_llm,
    open_fast_llm_index,
)
from jaxpipe.data.shards.parquet import open_parquet
from jaxpipe.data.shards.tokens import FULL_DIGEST_BYTES, IdFile, open_tokens
from jaxpipe.data.splits import check_one_split
from jaxpipe.runtime.storage.files import local_copy

_SUFFIXES = (".bin", ".npy", ".ds", FAST_LLM, ".parquet")
_UNREAD = (".arrow", ".feather", ".mds", ".npz", ".tar", ".tfrecord")
_OF_TOKENS = (*_SUFFIXES, ".idx", ".mask")
_CHUNK = 1 << 20  # tokens checked at a time


def open_documents(
    path: str, vocab_size: int, ignored: frozenset[str] = frozenset()
) -> ShardedDocuments:
    """Open the token files that a path names, in the order of their names.

    `ignored` has names of Parquet's columns, see `open_parquet`.

    Raises `ConfigError` where there is none, one is faulty, or they were prepared with different
    tokenizers.
    """
    shards: list[TokenShard] = []
    tokenizers: dict[str, Path] = {}
    files: list[Path] = []  # token files outside prepared folders
    for source in _find_inputs(path):
        manifest = find_manifest(source) if source.is_dir() else None
        if manifest:
            shards += _open_prepared(source, manifest, vocab_size)
            tokenizers[manifest.tokenizer.digest] = source
        else:
            files += _list_token_files(source)
    check_tokenizers(tokenizers)
    full_digest = sum(file.stat().st_size for file in files) <= FULL_DIGEST_BYTES
    shards += [_open_file(file, vocab_size, ignored, full_digest=full_digest) for file in files]
    shards = [shard for shard in shards if shard.size]
    if not shards:
        raise ConfigError(f"{path} holds no tokens: write it again, or name another in [data].")
    size = sum(shard.size for shard in shards)
    return ShardedDocuments(shards, vocab_size, 0, size, path, "".join(tokenizers))


def find_prepared_folders(path: str) -> list[Path]:
    """Return the prepared folders that a path names, in the order of their names.

    Of those at an address only the files that describe them are copied.
    """
    inputs = _find_inputs(path, lambda name: not name.endswith(_OF_TOKENS))
    return [folder for folder in inputs if (folder / MANIFEST).exists()]


def find_bare_files(path: str) -> list[Path]:
    """Return what a path names besides prepared folders, in the order of their names."""
    return [one for one in _find_inputs(path) if not (one / MANIFEST).exists()]


def check_tokenizers(places: dict[str, Path] | dict[str, str]) -> None:
    """Raise `ConfigError` for more than one tokenizer; `places` maps tokenizer digests to paths."""
    if len(places) > 1:
        one, other, *_ = places.values()
        raise ConfigError(
            f"{one} and {other} were prepared with different tokenizers, whose ids mean different "
            f"text: prepare one of them again."
        )


def _find_inputs(path: str, is_wanted: Callable[[str], bool] = bool) -> list[Path]:
    """Return the files and folders that a path names, in the order of their names.

    A pattern matches token files and prepared folders. Files inside a matched prepared folder are
    not listed again. Those at an address are copied to this machine once.
    """
    path = os.fspath(local_copy(path, is_wanted))
    if Path(path).exists():
        return [Path(path)]
    if Path(f"{path}.bin").is_file():  # Megatron's way to name a shard
        return [Path(f"{path}.bin")]
    named = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    prepared = {p for p in named if (p / MANIFEST).exists() or (p / JOURNAL).exists()}
    inputs = [p for p in named if p in prepared or (_is_token_file(p) and p.parent not in prepared)]
    if not inputs:
        raise ConfigError(f"{path} does not exist: correct its path in [data].")
    return inputs


def _list_token_files(path: Path) -> list[Path]:
    """Return the token file itself, or the token files of a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_token_file(file))
        check_one_split(path, files)
        if unread := [file for file in path.iterdir() if files and _holds_other_ids(file)]:
            raise ConfigError(
                f"{min(unread)} is not read, unlike {files[0].name} beside it: convert or unpack "
                f"it, or move it elsewhere."
            )
        for index in path.glob("*.idx"):
            if index.with_suffix(".bin") not in files:
                raise ConfigError(f"{index} has no {index.stem}.bin beside it: copy it there.")
    elif not _is_token_file(path):
        files = []
    if not files:
        raise ConfigError(
            f"a token file ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, unlike {path}"
            f"{' and all that is in it' if path.is_dir() else ''}: turn text into token ids with "
            f"`python -m jaxpipe.data prepare`, and rename or convert files of ids."
        )
    return files


def _holds_other_ids(file: Path) -> bool:
    """Whether a file beside token files is likely to hold ids, in a form that is not read."""
    suffix = unpacked_suffix(file)
    return suffix in _UNREAD or (suffix in _SUFFIXES and is_compressed(file))


def _is_token_file(file: Path) -> bool:
    """Whether a file's suffix, in any case, is that of a token file."""
    if file.suffix.lower() in (".bin", ".ds") and file.suffix != file.suffix.lower():
        raise ConfigError(
            f"{file} is named {file.suffix}, and the files beside it that say what it holds would "
            f"not be found: rename them to end in small letters."
        )
    return file.suffix.lower() in _SUFFIXES


def _open_file(
    path: Path, vocab_size: int, ignored: frozenset[str], *, full_digest: bool
) -> TokenShard:
    if path.suffix == ".bin" and (index := path.with_suffix(".idx")).exists():
        version = index_version(index)
        return open_fast_llm_index(path, version) if version in (2, 3) else open_indexed(path)
    if path.stat().st_size == 0:
        raise ConfigError(f"the token file {path} is empty: write it again, or name another.")
    if path.suffix.lower() == ".parquet":
        return open_parquet(path, ignored)
    if path.suffix == ".ds":
        return open_datatrove(path)
    if path.suffix == FAST_LLM:
        return open_fast_llm(path)
    return open_tokens(path, vocab_size, full_digest=full_digest)


def _open_prepared(folder: Path, manifest: FolderManifest, vocab_size: int) -> list[IndexedShard]:
    """Open the shards that a manifest lists, and check the sizes of their files only."""
    shards = []
    for entry in manifest.shards:
        path = folder / f"{entry.name}.bin"
        ids = IdFile(path, np.dtype(entry.dtype), 0, entry.tokens)
        index = Index(path.with_suffix(".idx"), entry.documents, entry.documents + 1)
        masked = entry.counted < entry.tokens
        shard = IndexedShard(ids, index, masked, entry.digest, vouched=True)
        try:
            fault = describe_size_fault(shard)
        except OSError as error:
            fault = f"{error.filename} cannot be read ({error.strerror})"
        if fault:
            raise ConfigError(
                f"{folder / MANIFEST} does not fit {path.name}: {fault}; copy or "
                f"prepare the folder again."
            )
        if not 0 <= entry.smallest_id <= entry.largest_id < vocab_size:
            _check_all_ids(ids, vocab_size)
        shards.append(shard)
    return shards


def _check_all_ids(ids: IdFile, vocab_size: int) -> None:
    """Search all ids, and raise `ConfigError` with the position of one outside the vocabulary."""
    for begin in range(0, ids.size, _CHUNK):
        part = ids.read(begin, min(begin + _CHUNK, ids.size))
        check_ids(part, vocab_size, ids.path, begin)
