"""Shards in the format of Megatron-LM: `NAME.bin` with token ids, `NAME.idx` with documents.

The layout is that of `MMapIndexedDataset` (Megatron-LM, megatron/core/datasets/indexed_dataset.py),
all little-endian. The `.idx` has

    9 bytes  b"MMIDIDX\\x00\\x00"    int32[N]  tokens of every sequence
    uint64   1, the version        int64[N]  offset of every sequence in the .bin, in bytes
    uint8    type of the ids       int64[D]  the first sequence of every document, and N
    uint64   N, sequences          int8[N]   modality of every sequence, in multimodal files: unread
    uint64   D, documents + 1; or 1: every sequence is a document

`writing` stores every document as one sequence. Where some tokens do not count in the loss,
`NAME.mask` has a bit per token, the lowest bit of a byte first, 1 for tokens that count as targets.
"""

import bisect
import hashlib
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.tokens import IdFile

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6, 7: floats
CODES = {np.dtype(name): code for code, name in TYPES.items()}


@dataclass(frozen=True)
class Index:
    """An `.idx` file with random access."""

    path: Path
    sequences: int  # N
    ends: int  # D

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.ends - 1 if self.ends > 1 else self.sequences

    @property
    def lengths(self) -> IdFile:
        """Tokens of every sequence."""
        return IdFile(self.path, np.dtype("<i4"), HEADER.size, self.sequences)

    @property
    def pointers(self) -> IdFile:
        """Offset of every sequence in the `.bin`, in bytes."""
        return IdFile(self.path, np.dtype("<i8"), HEADER.size + 4 * self.sequences, self.sequences)

    @property
    def firsts(self) -> IdFile:
        """The first sequence of every document, and N."""
        return IdFile(self.path, np.dtype("<i8"), HEADER.size + 12 * self.sequences, self.ends)


@dataclass(frozen=True)
class IndexedShard:
    """A `.bin` with its `.idx` and an optional `.mask`."""

    ids: IdFile
    index: Index
    masked: bool
    digest: str
    vouched: bool
    whole_digest: None = None

    @property
    def path(self) -> Path:
        """The `.bin`."""
        return self.ids.path

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.ids.size

    @property
    def mask(self) -> IdFile:
        """The loss mask: one bit per token, packed into uint8."""
        return IdFile(self.path.with_suffix(".mask"), np.dtype("u1"), 0, -(-self.size // 8))

    def lengths(self) -> np.ndarray:
        """Return the tokens of every document, integers `[documents]`."""
        index = self.index
        if index.documents == index.sequences:
            return index.lengths.read(0, index.sequences)
        begins = index.pointers.read(0, index.sequences) // self.ids.dtype.itemsize
        return np.diff(np.append(begins, self.size)[index.firsts.read(0, index.ends)])

    def document_start(self, token: int) -> int:
        """Return the first token of the document that contains this token."""
        index, width = self.index, self.ids.dtype.itemsize
        starts = index.pointers.read_one
        first = bisect.bisect_right(range(index.sequences), token * width, key=starts) - 1
        if index.documents != index.sequences:
            firsts = index.firsts.read_one
            first = firsts(bisect.bisect_right(range(index.ends), first, key=firsts) - 1)
        return starts(first) // width

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the ids of the tokens from `begin` to `end`."""
        return self.ids.read(begin, end)

    def counted(self, begin: int, end: int) -> np.ndarray | None:
        """Return which of these tokens count in the loss, bool `[end - begin]`; None: all."""
        if not self.masked:
            return None
        first = begin // 8
        bits = np.unpackbits(self.mask.read(first, -(-end // 8)), bitorder="little")
        return bits[begin - 8 * first : end - 8 * first].astype(bool)


def open_indexed(path: Path) -> IndexedShard:
    """Open a `.bin` with its `.idx`, and check from a few bytes that they belong together.

    Raises `ConfigError` where they do not, or where the `.idx` has another format.
    """
    index, size = path.with_suffix(".idx"), path.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC + b"\1" + bytes(7)):
        raise ConfigError(
            f"{index} is no index of version 1 in Megatron's format, nor of 2 or 3 in Fast-LLM's, "
            f"or is truncated: write it and {path.name} again."
        )
    _, _, code, sequences, ends = HEADER.unpack(head)
    if code not in TYPES:
        raise ConfigError(f"{index} has ids of type {code}, which is no integer: write it again.")
    dtype = np.dtype(TYPES[code])
    ids = IdFile(path, dtype, 0, size // dtype.itemsize)
    masked = path.with_suffix(".mask").exists()
    shard = IndexedShard(ids, Index(index, sequences, ends), masked, "", vouched=False)
    if reason := _describe_mismatch(shard):
        raise ConfigError(f"{index} does not fit {path.name}: {reason}; write both again.")
    files = [ids, shard.index.lengths, *([shard.mask] if masked else [])]
    digests = " ".join(file.sampled_digest() for file in files)
    return replace(shard, digest=f"~{hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()}")


def describe_size_fault(shard: IndexedShard) -> str:
    """Describe the file of a shard whose size is wrong; empty where all sizes are right."""
    index, width = shard.index, shard.ids.dtype.itemsize
    least = HEADER.size + 12 * index.sequences + 8 * index.ends
    wanted = {shard.path: [shard.size * width], index.path: [least, least + index.sequences]}
    if shard.masked:
        wanted[shard.mask.path] = [shard.mask.size]
    for path, sizes in wanted.items():
        if (size := path.stat().st_size) not in sizes:
            return f"{path.name} has {size} bytes, not {sizes[0]}"
    return ""


def _describe_mismatch(shard: IndexedShard) -> str:
    """Describe why an `.idx` does not match its `.bin`, or return ""; reads no tokens."""
    if fault := describe_size_fault(shard):
        return fault
    index, end = shard.index, 0
    if index.sequences:
        last = index.sequences - 1
        end = (
            index.pointers.read_one(last) + index.lengths.read_one(last) * shard.ids.dtype.itemsize
        )
    if end != shard.path.stat().st_size:
        return f"its sequences end at byte {end}, the file at {shard.path.stat().st_size}"
    if index.ends > 1 and index.firsts.read_one(index.ends - 1) != index.sequences:
        return f"its documents do not end with its {index.sequences} sequences"
    return ""
