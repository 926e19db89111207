"""Bare token files, `.npy` or `.bin`: one array of ids without document boundaries."""

import errno
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.input_files import find_magic
from jaxpipe.data.shards.documents import TokenShard, check_ids
from jaxpipe.runtime.storage.errors import describe

FULL_DIGEST_BYTES = (
    1 << 30
)  # bytes of a source up to which opening reads all its bare files, in about 1 s
# The header of token files of llm.c and modded-nanogpt: 256 int32, which start with the magic
# number, the version and the number of tokens that follow (llm.c, dev/data/data_common.py).
_HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_HEADER_BYTES = 1024
_NPY = b"\x93NUMPY"
_CHUNK = 1 << 20  # tokens read at a time
_FEWEST_PAIRS, _MOST_HIGH = 16, 3  # of 16-bit halves of 32-bit ids
_BLOCKS, _BLOCK = 16, 4096  # blocks in a sampled digest, and bytes of each


@dataclass(frozen=True)
class IdFile:
    """An array of integers in a file, with random access; the file is opened for every read."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first integer
    size: int  # number of integers

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the integers from `begin` to `end`.

        Raises `ConfigError` where the file cannot be read or has become shorter.
        """
        try:
            at = self.offset + begin * self.dtype.itemsize
            ids = np.fromfile(self.path, self.dtype, end - begin, offset=at)
            if len(ids) < end - begin and self.path.stat().st_size >= at + ids.itemsize * (
                end - begin
            ):
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # numpy does not tell
        except OSError as error:
            otherwise = f"{self.path} cannot be read any more ({error.strerror}): put it back."
            raise ConfigError(describe(error, str(self.path), otherwise)) from error
        if len(ids) < end - begin:
            raise ConfigError(f"{self.path} has become shorter since it was opened: put it back.")
        return ids

    def read_one(self, index: int) -> int:
        """Return the integer at an index."""
        return int(self.read(index, index + 1)[0])

    def sampled_digest(self) -> str:
        """Return a digest of the dtype, the size and 16 blocks of the file, prefixed with `~`."""
        digest = hashlib.blake2b(f"{self.dtype.str} {self.size}".encode(), digest_size=8)
        last = max(self.size * self.dtype.itemsize - _BLOCK, 0)
        with self.path.open("rb", buffering=0) as file:
            for at in sorted({last * part // (_BLOCKS - 1) for part in range(_BLOCKS)}):
                file.seek(self.offset + at)
                digest.update(file.read(min(_BLOCK, self.size * self.dtype.itemsize)))
        return f"~{digest.hexdigest()}"

    def whole_digest(self, check: Callable[[np.ndarray, int], None] = lambda *_: None) -> str:
        """Return a digest of all integers, 16 hex digits, computed at about 1 GB/s.

        `check` is called with every chunk of ids and the position of its first id.
        """
        digest = hashlib.blake2b(self.dtype.str.encode(), digest_size=8)
        for begin in range(0, self.size, _CHUNK):
            ids = self.read(begin, min(begin + _CHUNK, self.size))
            check(ids, begin)
            digest.update(ids.data)
        return digest.hexdigest()


@dataclass(frozen=True)
class BareShard:
    """Token ids in text order.

    `ends` has the cumulative tokens at the end of each document. With None there are no boundaries:
    the file is one document, which may be split anywhere. `mask` returns which tokens of a range
    count in the loss; None: all do.
    """

    ids: IdFile
    digest: str
    vouched: bool
    whole_digest: Callable[[], str] | None = None
    ends: np.ndarray | None = None
    mask: Callable[[int, int], np.ndarray] | None = None

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.ids.path

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.ids.size

    def lengths(self) -> np.ndarray:
        """Return the tokens of every document, integers `[documents]`."""
        return np.array([self.size]) if self.ends is None else np.diff(self.ends, prepend=0)

    def document_start(self, token: int) -> int:
        """Return the first token of this token's document; without boundaries the token itself."""
        if self.ends is None:
            return token
        before = int(np.searchsorted(self.ends, token, side="right"))
        return int(self.ends[before - 1]) if before else 0

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the ids of the tokens from `begin` to `end`."""
        return self.ids.read(begin, end)

    @property
    def masked(self) -> bool:
        """Whether it has a loss mask."""
        return self.mask is not None

    def counted(self, begin: int, end: int) -> np.ndarray | None:
        """Return which of these tokens count in the loss, bool `[end - begin]`; None: all."""
        return None if self.mask is None else self.mask(begin, end)


class Sidecar(msgspec.Struct, frozen=True):
    """Content of `NAME.json`, which gives the dtype of a bare file; other fields are ignored."""

    dtype: Literal["uint8", "uint16", "uint32", "uint64"]


def values_beside(shard: TokenShard, name: str) -> IdFile:
    """Float32 values beside a shard's tokens, one for each, in a file `NAME.<name>`."""
    return IdFile(shard.path.with_suffix(f".{name}"), np.dtype("<f4"), 0, shard.size)


def open_tokens(path: Path, vocab_size: int, *, full_digest: bool) -> BareShard:
    """Open a file of token ids.

    The dtype of a `.npy` file is in its header. A `.bin` file has the header of llm.c, or is bare
    little-endian integers, as OLMo's `.npy` without a header; their dtype is in the sidecar,
    `{"dtype": "uint8" | "uint16" | "uint32" | "uint64"}` in the `.json` file of the same name.
    Without a sidecar a `.bin` is uint16.

    Args:
      path: the file.
      vocab_size: ids must be below it.
      full_digest: read the file now, at about 1 GB/s, to check and digest all ids. Otherwise the
        digest covers a sample, and ids are checked when they are read.

    Raises `ConfigError` where the file is truncated or not 1-D integers, or where an id is not in
    0..vocab_size-1.
    """
    with path.open("rb") as file:
        has_header = file.read(len(_NPY)) == _NPY
    sidecar = path.with_suffix(".json")
    if path.suffix.lower() == ".npy" and not has_header and not sidecar.exists():
        raise ConfigError(
            f"{path} is truncated, or has no header of .npy, as the token files of OLMo: write "
            f'their type to {sidecar.name}, as {{"dtype": "uint32"}}.'
        )
    ids = _open_npy(path) if has_header else _open_bin(path)
    if not full_digest:
        return BareShard(ids, ids.sampled_digest(), False, ids.whole_digest)
    digest = ids.whole_digest(lambda part, begin: check_ids(part, vocab_size, path, begin))
    return BareShard(ids, digest, vouched=True)


def _open_npy(path: Path) -> IdFile:
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ConfigError(
            f"the token file {path} is truncated, or not a .npy array of integers ({error}): write "
            f"it again with numpy.save."
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"a token file is a 1-D array of integers, but {path} has shape {ids.shape} and dtype "
            f"{ids.dtype}: flatten it, or convert it."
        )
    return IdFile(path, ids.dtype, ids.offset, len(ids))


def _open_bin(path: Path) -> IdFile:
    sidecar, size = path.with_suffix(".json"), path.stat().st_size
    if llmc_file := _open_llmc(path, size):
        return llmc_file
    _check_is_bare(path)
    try:
        name = "uint16"
        if sidecar.exists():
            name = msgspec.json.decode(sidecar.read_bytes(), type=Sidecar).dtype
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f'{sidecar} gives the type of the tokens in {path} and must be like {{"dtype": '
            f'"uint16"}}, with uint8, uint16, uint32 or uint64 ({error}): correct it.'
        ) from error
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        raise ConfigError(
            f"the token file {path} has {size} bytes, not a multiple of the {dtype.itemsize} bytes "
            f"of a {name}: it is truncated, or {sidecar.name} must name another dtype."
        )
    if not sidecar.exists() and _looks_wider(np.fromfile(path, dtype, _CHUNK)):
        raise ConfigError(
            f"{path} is read as uint16, but every second one is 0 to {_MOST_HIGH}, as in a file of "
            f'uint32: write {{"dtype": "uint32"}} to {sidecar.name}, or uint16 if it is.'
        )
    return IdFile(path, dtype, 0, size // dtype.itemsize)


def _check_is_bare(path: Path) -> None:
    """Raise `ConfigError` where a file of ids is one of another program, with a head of its own."""
    with path.open("rb") as file:
        found = find_magic(file.read(512), least=4)  # fewer bytes may be ids
    if (path.parent / "index.json").exists() and re.match(r"chunk-\d+-\d+\.", path.name):
        found = "a chunk of LitData, which is not read"
    if found:
        raise ConfigError(
            f"{path} should be bare ids, but it is {found}: unpack it, or write its ids as .npy."
        )


def _looks_wider(ids: np.ndarray) -> bool:
    """Whether uint16 ids are rather the halves of wider ones, of a vocabulary of up to 262,144."""
    low, high = ids[: len(ids) // 2 * 2].reshape(-1, 2).T
    return len(low) >= _FEWEST_PAIRS and high.max() <= _MOST_HIGH < low.max()


def _open_llmc(path: Path, size: int) -> IdFile | None:
    """Open a file with the header of llm.c; None for a file without it."""
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist() if size >= 12 else (0, 0, 0)
    if magic not in {known for known, _ in _HEADERS}:
        return None
    name = _HEADERS.get((magic, version))
    if name is None:
        raise ConfigError(
            f"{path} begins as a token file of llm.c, but of version {version}, which is not read: "
            f"write it as .npy."
        )
    dtype = np.dtype(name).newbyteorder("<")
    if size != _HEADER_BYTES + tokens * dtype.itemsize:
        raise ConfigError(
            f"{path} begins as a token file of llm.c with {tokens} tokens of {name}, which is "
            f"{_HEADER_BYTES + tokens * dtype.itemsize} bytes, but it has {size}: it is truncated, "
            f"or must be written again."
        )
    return IdFile(path, dtype, _HEADER_BYTES, tokens)
