"""Write shards, of which a file with its final name is complete and synced to disk."""

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxpipe.data.shards.indexed import CODES, HEADER, MAGIC
from jaxpipe.data.shards.manifest import ShardEntry
from jaxpipe.runtime.storage.writing import replace_atomically, sync_folder


class DocumentBatch(NamedTuple):
    """Several documents, concatenated."""

    ids: np.ndarray  # integers [tokens]
    lengths: np.ndarray  # integers [documents] > 0, with the sum `tokens`
    counted: np.ndarray  # bool [tokens]: whether a token counts in the loss as a target


def write_shard(
    folder: Path, name: str, dtype: np.dtype, batches: Iterator[DocumentBatch]
) -> tuple[ShardEntry, np.ndarray] | None:
    """Write documents to a shard.

    The `.bin` gets its final name last, so its existence implies that of the `.idx` and `.mask`.

    Returns:
      The manifest's entry, and the documents' lengths, int32 `[documents]`; None without documents.
    """
    first = next(batches, None)
    if first is None:
        return None
    path, digest = folder / f"{name}.bin", hashlib.blake2b(digest_size=16)
    smallest, largest, all_lengths = first.ids[0], first.ids[0], []
    counted, packed, rest = 0, [], np.zeros(0, bool)  # the mask, in bits: a shard may be large
    with replace_atomically(path) as file:
        for batch in chain([first], batches):
            smallest = min(smallest, batch.ids.min())
            largest = max(largest, batch.ids.max())
            content = batch.ids.astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            all_lengths.append(batch.lengths)
            counted += int(batch.counted.sum())
            rest = np.concatenate([rest, batch.counted])
            whole = len(rest) // 8 * 8
            packed.append(np.packbits(rest[:whole], bitorder="little"))
            rest = rest[whole:]
        lengths = np.concatenate(all_lengths).astype("<i4")
        digest.update(lengths.tobytes())
        with replace_atomically(path.with_suffix(".idx")) as index:
            write_index(index, lengths, dtype)
        tokens = int(lengths.sum(dtype=np.int64))
        if counted < tokens:
            bits = np.concatenate([*packed, np.packbits(rest, bitorder="little")]).tobytes()
            with replace_atomically(path.with_suffix(".mask")) as mask:
                mask.write(bits)
            digest.update(bits)
    sync_folder(folder)
    return ShardEntry(
        name=name,
        dtype=dtype.name,
        documents=len(lengths),
        tokens=tokens,
        counted=counted,
        smallest_id=int(smallest),
        largest_id=int(largest),
        digest=digest.hexdigest(),
    ), lengths


def write_index(file: BinaryIO, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write an `.idx` with one sequence per document."""
    documents = len(lengths)
    file.write(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    file.write(lengths.tobytes())
    file.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes())
    file.write(np.arange(documents + 1, dtype="<i8").tobytes())
