"""A shard in Megatron's format, written from its published layout."""

import struct

import numpy as np


def write_shard(path, documents):
    """`path.bin` and `path.idx` of documents of token ids below 65,536; the path of the former."""
    lengths = [len(document) for document in documents]
    starts = 2 * np.cumsum([0, *lengths])[:-1]
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    path.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(documents), len(documents) + 1)
        + np.array(lengths, "<i4").tobytes()
        + starts.astype("<i8").tobytes()
        + np.arange(len(documents) + 1, dtype="<i8").tobytes()
    )
    return path.with_suffix(".bin")
