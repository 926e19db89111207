"""Megatron's `.bin` and `.idx` written and read by their published layout, with struct alone."""

import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write(path: Path, documents: list[list[list[int]]], dtype: str, modes: bool = False) -> Path:
    """Write documents of sequences of ids."""
    sequences = [sequence for document in documents for sequence in document]
    width = np.dtype(dtype).itemsize
    starts, at = [], 0
    for sequence in sequences:
        starts.append(at)
        at += len(sequence) * width
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    index = MAGIC + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(ends))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *starts) + struct.pack(f"<{len(ends)}q", *ends)
    path.with_suffix(".idx").write_bytes(index + bytes(len(sequences)) * modes)
    path.write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    return path


def read(path: Path) -> list[list[int]]:
    """Return the ids of every document."""
    index, content = path.with_suffix(".idx").read_bytes(), path.read_bytes()
    magic, version, code, count, ends = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (MAGIC, 1)
    (dtype,) = (np.dtype(name) for name, known in CODES.items() if known == code)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    starts = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    documents = struct.unpack_from(f"<{ends}q", index, 34 + 12 * count)
    assert len(index) == 34 + 12 * count + 8 * ends
    sequences = [
        np.frombuffer(content, dtype, length, start).tolist()
        for length, start in zip(lengths, starts, strict=True)
    ]
    return [[*chain(*sequences[a:b])] for a, b in pairwise(documents)]
