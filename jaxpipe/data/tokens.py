"""Bare files of token ids, `.npy` or `.bin`: one long row of them without borders."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.documents import check_ids

WHOLE = 1 << 30  # bytes of a source up to which its bare files are read whole on opening: a second
# How llm.c and modded-nanogpt begin a file of tokens: 256 int32, of which the first are the number
# of the format, its version, and how many tokens follow (llm.c, dev/data/data_common.py).
_HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_HEADER_BYTES = 1024
_CHUNK = 1 << 20  # tokens read at a time
_BLOCKS, _BLOCK = 16, 4096  # a large file is known by so many stretches of so many bytes


@dataclass(frozen=True)
class IdFile:
    """Integers in a file, of which any stretch can be read. It is not held open."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first
    size: int  # integers

    def read(self, begin: int, end: int) -> np.ndarray:
        """Those from `begin` to `end`. Raises `ConfigError` where the file has become shorter."""
        try:
            at = self.offset + begin * self.dtype.itemsize
            ids = np.fromfile(self.path, self.dtype, end - begin, offset=at)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be read any more ({error.strerror}): put it back."
            ) from error
        if len(ids) < end - begin:
            raise ConfigError(f"{self.path} has become shorter since it was opened: put it back.")
        return ids

    def one(self, index: int) -> int:
        """That of a number."""
        return int(self.read(index, index + 1)[0])

    def sampled_digest(self) -> str:
        """Digest of the type, the length and a few stretches of the file."""
        digest = hashlib.blake2b(f"{self.dtype.str} {self.size}".encode(), digest_size=8)
        last = max(self.size * self.dtype.itemsize - _BLOCK, 0)
        with self.path.open("rb", buffering=0) as file:
            for at in sorted({last * part // (_BLOCKS - 1) for part in range(_BLOCKS)}):
                file.seek(self.offset + at)
                digest.update(file.read(min(_BLOCK, self.size * self.dtype.itemsize)))
        return f"~{digest.hexdigest()}"

    def whole_digest(self, check: Callable[[np.ndarray, int], None] = lambda *_: None) -> str:
        """Digest of all: 16 hex digits, at about 1 GB/s; `check` is given ids and their begin."""
        digest = hashlib.blake2b(self.dtype.str.encode(), digest_size=8)
        for begin in range(0, self.size, _CHUNK):
            ids = self.read(begin, min(begin + _CHUNK, self.size))
            check(ids, begin)
            digest.update(ids.data)
        return digest.hexdigest()


@dataclass(frozen=True)
class BareShard:
    """Token ids in text order.

    `ends` has the tokens up to the end of each document; None: there are no borders, all is one
    document, which may be cut anywhere.
    """

    ids: IdFile
    digest: str
    vouched: bool
    whole_digest: Callable[[], str] | None = None
    ends: np.ndarray | None = None
    masked: bool = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.ids.path

    @property
    def size(self) -> int:
        """Tokens in it."""
        return self.ids.size

    def lengths(self) -> np.ndarray:
        """Tokens of every document, integers `[documents]`."""
        return np.array([self.size]) if self.ends is None else np.diff(self.ends, prepend=0)

    def document_start(self, token: int) -> int:
        """Where the document with this token begins; without borders any may be the first."""
        if self.ends is None:
            return token
        before = int(np.searchsorted(self.ends, token, side="right"))
        return int(self.ends[before - 1]) if before else 0

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids of the tokens from `begin` to `end`."""
        return self.ids.read(begin, end)

    def counted(self, begin: int, end: int) -> None:
        """None: all count in the loss."""
        return None


class Sidecar(msgspec.Struct, frozen=True):
    """What `tokens.json` says of the `tokens.bin` beside it; other fields are ignored."""

    dtype: Literal["uint8", "uint16", "uint32"]


def open_tokens(path: Path, vocab_size: int, *, whole: bool) -> BareShard:
    """Open a file of token ids.

    A `.npy` file names its integer type itself. A `.bin` file has the header of llm.c, which tells,
    or is bare little-endian integers of the type in its sidecar, `{"dtype": "uint8" | "uint16" |
    "uint32"}` in the `.json` file of the same name, uint16 where there is none. With `whole` it is
    read once to check and digest it, at about 1 GB/s; else it is known by stretches of it, and ids
    are checked as they are read.

    Raises `ConfigError` where the file is truncated or not 1-D integers, or where an id is not in
    0..vocab_size-1.
    """
    ids = _open_npy(path) if path.suffix.lower() == ".npy" else _open_bin(path)
    if not whole:
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
    if found := _open_llmc(path, size):
        return found
    try:
        name = "uint16"
        if sidecar.exists():
            name = msgspec.json.decode(sidecar.read_bytes(), type=Sidecar).dtype
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f'{sidecar} gives the type of the tokens in {path} and must be like {{"dtype": '
            f'"uint16"}}, with uint8, uint16 or uint32 ({error}): correct it.'
        ) from error
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        raise ConfigError(
            f"the token file {path} has {size} bytes, not a multiple of the {dtype.itemsize} bytes "
            f"of a {name}: it is truncated, or {sidecar.name} must name another dtype."
        )
    return IdFile(path, dtype, 0, size // dtype.itemsize)


def _open_llmc(path: Path, size: int) -> IdFile | None:
    """The ids behind the header of llm.c, where a file begins with one."""
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
