"""Documents of text from files: text, JSON lines and Parquet, perhaps compressed.

A text file is one document. A line of a `.jsonl` file, or a row of a `.parquet` file, is one: the
text of a field, or what a model is to answer, with what it is asked:

    {"text": "..."}                                          all of it counts in the loss
    {"prompt": "...", "completion": "..."}                   the completion counts
    {"messages": [{"role": "...", "content": "..."}, ...]}   what the assistant says counts

Messages are written in ChatML, `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; of those of the assistant
all counts from CONTENT on.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import needed

Passages = list[tuple[str, bool]]  # the text of a document, and whether it counts in the loss
FIELDS = ("messages", "prompt", "completion", "text")
_KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "rows"}
_CHUNK = 1 << 20  # bytes read at a time
_ROWS = 256  # of Parquet that are read at a time


class Part(msgspec.Struct, frozen=True):
    """A stretch of an input file: bytes of plain lines, row groups of Parquet, else all of it."""

    path: str
    begin: int
    end: int  # not included
    size: int  # bytes on disk


def kind(path: Path) -> str:
    """What the documents of a file are: its `lines` or `rows`, or the `text` in it."""
    return _KINDS.get((path.with_suffix("") if is_compressed(path) else path).suffix, "text")


def is_compressed(path: Path) -> bool:
    """Whether a file can only be read from its beginning."""
    return path.suffix in (".gz", ".zst")


@dataclass
class Reader:
    """Reads the documents of parts, and counts what it leaves out."""

    field: str  # that holds the text; empty: messages, prompt and completion, or text
    skip_bad: bool  # leave out what cannot be read
    advance: Callable[[int], None]  # told of bytes on disk that were read
    bad: int = 0

    def documents(self, part: Part) -> Iterator[Passages]:
        """The documents of a part, in order.

        Raises `ConfigError` with file and line for what cannot be read.
        """
        path = Path(part.path)
        read = {"lines": _lines, "rows": partial(_rows, self.field), "text": _text}[kind(path)]
        for number, (load, size) in enumerate(read(part)):
            try:
                yield passages(load(), self.field)
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                if not self.skip_bad:
                    raise ConfigError(
                        f"{_place(part, number)} is no document: {error}; correct it, or give "
                        f"--field or --skip-bad-lines."
                    ) from error
                self.bad += 1
            self.advance(size)


def passages(record: Any, field: str = "") -> Passages:
    """The text of a record, and what of it counts in the loss.

    Raises `ValueError` where it has not the fields that it must have.

    >>> passages({"prompt": "1 + 1 = ", "completion": "2"})
    [('1 + 1 = ', False), ('2', True)]
    """
    if isinstance(record, str):
        return [(record, True)]
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if not field and "messages" in record:
        return _chat(record["messages"])
    if not field and "prompt" in record and "text" not in record:
        return [(_string(record, "prompt"), False), (_string(record, "completion"), True)]
    return [(_string(record, field or "text"), True)]


def _chat(messages: Any) -> Passages:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("its messages are no list of objects")
    taken = []
    for message in messages:
        role, content = _string(message, "role"), _string(message, "content")
        taken.append((f"<|im_start|>{role}\n", False))
        taken.append((f"{content}<|im_end|>\n", role == "assistant"))
    return taken


def _string(record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise ValueError(f"it has no field {field!r}, but {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"its field {field!r} is no string")
    return record[field]


Item = tuple[Callable[[], Any], int]  # what makes a record of one, and its bytes on disk


def _text(part: Part) -> Iterator[Item]:
    content = b"".join(chunk for chunk, _ in _unpacked(Path(part.path)))
    yield content.decode, part.size


def _lines(part: Part) -> Iterator[Item]:
    """The lines that begin in a part, but empty ones."""
    path = Path(part.path)
    for line, size in _compressed_lines(path) if is_compressed(path) else _plain_lines(part):
        if line.strip():
            yield partial(msgspec.json.decode, line), size


def _plain_lines(part: Part) -> Iterator[tuple[bytes, int]]:
    with Path(part.path).open("rb") as file:
        if part.begin:
            file.seek(part.begin - 1)
            file.readline()  # the end of a line that began before
        at = file.tell()
        while at < part.end and (line := file.readline()):
            yield line, len(line)
            at += len(line)


def _compressed_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    rest = b""
    for chunk, size in _unpacked(path):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line, size
            size = 0  # of all the lines of a chunk
    yield rest, 0


def _unpacked(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a file in chunks, with the bytes on disk that each took."""
    read = {".gz": _gzip_chunks, ".zst": _zst_chunks}.get(path.suffix, _plain_chunks)
    try:
        yield from read(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is truncated or damaged ({error}): fetch it again.") from error


def _plain_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    yield (content := path.read_bytes()), len(content)


def _gzip_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file, gzip.GzipFile(fileobj=file) as unpacked:
        before = 0
        while chunk := unpacked.read(_CHUNK):
            yield chunk, file.tell() - before
            before = file.tell()


def _zst_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    zstandard = needed("zstandard", f"reading {path}")
    decompressor, frame = zstandard.ZstdDecompressor(), None
    with path.open("rb") as file:
        while left := file.read(_CHUNK):
            size = len(left)
            while left:  # may hold the end of a frame, and others
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(left), size
                except zstandard.ZstdError as error:
                    raise EOFError(error) from error
                left, size, frame = frame.unused_data, 0, None if frame.eof else frame
    if frame:
        raise EOFError("it ends within a frame")


def _rows(field: str, part: Part) -> Iterator[Item]:
    parquet = needed("pyarrow.parquet", f"reading {part.path}")
    with parquet.ParquetFile(part.path) as file:
        wanted = [field] if field else FIELDS
        columns = [name for name in wanted if name in file.schema_arrow.names]
        groups = range(part.begin, part.end)
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        try:
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns or None):
                size = part.size * batch.num_rows // rows
                for record in batch.to_pylist():
                    yield partial(dict, record), size
                    size = 0
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{part.path} is damaged ({first_line(error)}): fetch it again."
            ) from error


def _place(part: Part, number: int) -> str:
    """Where the document of a number is in its file, for messages."""
    path = Path(part.path)
    match kind(path):
        case "text":
            return part.path
        case "rows":
            metadata = needed("pyarrow.parquet", f"reading {path}").read_metadata(path)
            before = (metadata.row_group(group).num_rows for group in range(part.begin))
            return f"{path}, row {sum(before) + number + 1},"
    return f"{path}, line {_line_number(part, number)},"


def _line_number(part: Part, number: int) -> int:
    """Which line of its file is the one of that number in its part, empty ones left out."""
    path, before = Path(part.path), 0
    if is_compressed(path):
        lines = _compressed_lines(path)
    else:
        before = sum(1 for _ in _plain_lines(Part(part.path, 0, part.begin, 0)))
        lines = _plain_lines(part)
    full = (at for at, (line, _) in enumerate(lines, 1) if line.strip())
    return before + next(islice(full, number, None))
