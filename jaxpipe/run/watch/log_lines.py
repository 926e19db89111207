"""Lines of a log from its end, which need not be read whole."""

import os
from collections.abc import Iterator
from typing import BinaryIO

_BLOCK = 1 << 20


def lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield `(offset, line)` for the lines of a file, the last one first, without their ends.

    The part after the last line end counts as a line if it is not empty.
    """
    offset = end = file.seek(0, os.SEEK_END)
    pieces: list[bytes] = []  # of the line that ends at `end`, the last one first
    while offset:
        size = min(_BLOCK, offset)
        offset -= size
        file.seek(offset)
        first, *lines = file.read(size).split(b"\n")
        for line in reversed(lines):
            line = b"".join([line, *reversed(pieces)])
            pieces.clear()
            if line:
                yield end - len(line), line
            end -= len(line) + 1
        pieces.append(first)
    if line := b"".join(reversed(pieces)):
        yield 0, line
