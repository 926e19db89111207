"""Read documents from text, JSON and Parquet files, which may be compressed.

A text file is one document. So is a line of a `.jsonl` file, an element of a `.json` file that is
one array, or a row of a `.parquet` file; `records` defines the fields of a record.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.records import HARMLESS, MESSAGES, Passages, RecordConverter

_KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "rows"}
_CHUNK = 1 << 20  # bytes read at a time
_ROWS = 256  # Parquet rows read at a time
_NOT_JSON = re.compile(rb"NaN|Infinity")  # Python writes these values, but JSON has none of them


class FilePart(msgspec.Struct, frozen=True):
    """A range of an input file: bytes of plain lines, row groups of Parquet, else the full file."""

    path: str
    begin: int
    end: int  # exclusive
    size: int  # bytes on disk


def file_kind(path: Path) -> str:
    """Return the format of a file: `lines`, `elements` or `rows`, or `text`, one document."""
    suffix = (path.with_suffix("") if is_compressed(path) else path).suffix.lower()
    if suffix == ".json" and _begins_with_bracket(path):
        return "elements"
    return _KINDS.get(suffix, "text")


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, so that it can only be read from its start."""
    return path.suffix.lower() in (".gz", ".zst")


@dataclass
class DocumentReader:
    """Reads the documents of parts, and counts those that it leaves out."""

    records: RecordConverter
    skip_bad: bool  # leave out documents that cannot be read
    advance: Callable[[int], None]  # called with the bytes on disk of every document read
    bad: int = 0  # documents left out

    def documents(self, part: FilePart) -> Iterator[Passages]:
        """Yield the documents of a part, in order.

        Raises `ConfigError` with file and line for a document that cannot be read, unless
        `skip_bad` is set.
        """
        read = {"lines": _read_lines, "elements": _read_elements, "text": _read_text}
        read["rows"] = partial(_read_rows, self.records)
        for number, (load, size) in enumerate(read[file_kind(Path(part.path))](part)):
            try:
                yield from self.records.documents(load())
            except ConfigError as error:
                raise ConfigError(f"{_describe_place(part, number)} {error}") from error
            except (ValueError, RecursionError, msgspec.DecodeError) as error:
                if not self.skip_bad:
                    reason = (
                        "it is nested too deeply" if isinstance(error, RecursionError) else error
                    )
                    raise ConfigError(
                        f"{_describe_place(part, number)} is no document: {reason}; correct it, or "
                        f"give --field, --ignore or --skip-bad-lines."
                    ) from error
                self.bad += 1
            self.advance(size)


Item = tuple[Callable[[], Any], int]  # a function that parses a record, and its bytes on disk


def _parse_json(line: bytes) -> Any:
    """Parse a JSON record; accept NaN and Infinity, which Python writes."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        if not _NOT_JSON.search(line):
            raise
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # raises for half a surrogate pair
        return record


def _read_text(part: FilePart) -> Iterator[Item]:
    content = b"".join(chunk for chunk, _ in _decompress(Path(part.path)))
    yield partial(str, content, "utf-8-sig"), part.size


def _read_lines(part: FilePart) -> Iterator[Item]:
    """Yield the lines that start in a part, without empty ones."""
    path = Path(part.path)
    for line, size in (
        _read_compressed_lines(path) if is_compressed(path) else _read_plain_lines(part)
    ):
        if record := _strip_record(line):
            yield partial(_parse_json, record), size


def _strip_record(line: bytes) -> bytes:
    """Strip white space, and a BOM, which concatenated files have at any line."""
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _begins_with_bracket(path: Path) -> bool:
    """Whether the first character of a file, white space aside, opens a JSON array."""
    for chunk, _ in _decompress(path):
        if begin := chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:1]:
            return begin == b"["
    return False


def _read_elements(part: FilePart) -> Iterator[Item]:
    """Yield the elements of a file that is one JSON array."""
    for element, size, _ in _read_array(part):
        yield partial(_parse_json, element), size


def _read_array(part: FilePart) -> Iterator[tuple[bytes, int, int]]:
    """Yield the JSON of each array element, its bytes on disk, and the line where it starts.

    The text of the whole file is in memory, but only one record at a time.
    """
    content = b"".join(chunk for chunk, _ in _decompress(Path(part.path)))
    line, before = 1, 0
    try:
        text = content.decode("utf-8-sig")
        skip, scan = re.compile(r"[ \t\n\r]*").match, json.JSONDecoder().raw_decode
        at = skip(text, skip(text).end() + 1).end()
        more = not text.startswith("]", at)
        while more:
            line += text.count("\n", before, at)
            before, (_, end) = at, scan(text, at)
            share = part.size * end // len(text) - part.size * at // len(text)
            yield text[at:end].encode(), share, line
            at = skip(text, end).end()
            if more := text.startswith(",", at):
                at = skip(text, at + 1).end()
        if not text.startswith("]", at) or skip(text, at + 1).end() < len(text):
            raise ValueError("the array does not end behind this element")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{part.path} is no array of JSON from line {line} on ({first_line(error)}): correct "
            f"it."
        ) from error


def _read_plain_lines(part: FilePart) -> Iterator[tuple[bytes, int]]:
    with Path(part.path).open("rb") as file:
        if part.begin:
            file.seek(part.begin - 1)
            file.readline()  # the rest of a line that starts in the part before
        at = file.tell()
        while at < part.end and (line := file.readline()):
            yield line, len(line)
            at += len(line)


def _read_compressed_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    tail = b""
    for chunk, size in _decompress(path):
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            yield line, size
            size = 0  # the first line of a chunk reports the bytes of all its lines
    yield tail, 0


def _decompress(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the uncompressed content of a file in chunks, with the bytes on disk of each."""
    read = {".gz": _gzip_chunks, ".zst": _zst_chunks}.get(path.suffix.lower(), _plain_chunks)
    try:
        yield from read(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is truncated or damaged ({error}): fetch it again.") from error


def _plain_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk, len(chunk)


def _gzip_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file, gzip.GzipFile(fileobj=file) as unpacked:
        before = 0
        while chunk := unpacked.read(_CHUNK):
            yield chunk, file.tell() - before
            before = file.tell()


def _zst_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    zstandard = import_optional("zstandard", f"reading {path}")
    decompressor, frame = zstandard.ZstdDecompressor(), None
    with path.open("rb") as file:
        while compressed := file.read(_CHUNK):
            size = len(compressed)
            while compressed:  # a chunk may have the end of one frame and the start of others
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(compressed), size
                except zstandard.ZstdError as error:
                    raise EOFError(error) from error
                compressed, size, frame = frame.unused_data, 0, None if frame.eof else frame
    if frame:
        raise EOFError("it ends within a frame")


def _read_rows(records: RecordConverter, part: FilePart) -> Iterator[Item]:
    parquet = import_optional("pyarrow.parquet", f"reading {part.path}")
    with parquet.ParquetFile(part.path) as file:
        columns = _choose_columns(records, file.schema_arrow)
        groups = range(part.begin, part.end)
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        try:
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
                size = part.size * batch.num_rows // rows
                for record in batch.to_pylist():
                    yield partial(dict, record), size
                    size = 0
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{part.path} is damaged ({first_line(error)}): fetch it again."
            ) from error


def _choose_columns(records: RecordConverter, schema: Any) -> list[str]:
    """Return the columns to read: only the text's own, or for messages all that are not ignored."""
    names, field = schema.names, records.field
    if field:
        top, *inner = [field] if field in names else field.split(".")
        column = schema.field(top).type if top in names else None
        for name in inner:  # fields of nested structs
            index = column.get_field_index(name) if hasattr(column, "get_field_index") else -1
            column = column.field(index).type if index >= 0 else None
        if column is None:
            return names  # the error for the missing field names the existing ones
        if not hasattr(column, "value_field"):  # the field is no list, so it has no messages
            return [field]
    elif "text" in names and not records.pairs and not any(name in names for name in MESSAGES):
        return [name for name in ("text", "prompt", "completion") if name in names]
    own = {field, field.split(".")[0]}
    return [name for name in names if name in own or name not in HARMLESS | records.ignored]


def _describe_place(part: FilePart, number: int) -> str:
    """Return file and line or row of a part's document `number`, for error messages."""
    path = Path(part.path)
    match file_kind(path):
        case "text":
            return part.path
        case "rows":
            metadata = import_optional("pyarrow.parquet", f"reading {path}").read_metadata(path)
            before = (metadata.row_group(group).num_rows for group in range(part.begin))
            return f"{path}, row {sum(before) + number + 1},"
        case "elements":
            _, _, line = next(islice(_read_array(part), number, None))
            return f"{path}, line {line},"
    return f"{path}, line {_line_number(part, number)},"


def _line_number(part: FilePart, number: int) -> int:
    """Return the line in the file of the part's non-empty line `number`."""
    path, before = Path(part.path), 0
    if is_compressed(path):
        lines = _read_compressed_lines(path)
    else:
        before = sum(1 for _ in _read_plain_lines(FilePart(part.path, 0, part.begin, 0)))
        lines = _read_plain_lines(part)
    full = (at for at, (line, _) in enumerate(lines, 1) if _strip_record(line))
    return before + next(islice(full, number, None))
