"""Read documents from text, JSON, CSV, Parquet and Arrow files.

A text file is one document. So is a line of a `.jsonl` file, an element of a `.json` file that is
one array, or a row of a `.csv`, `.tsv`, `.parquet` or `.arrow` file; `records` defines the fields
of a record. Text, JSON and CSV may be compressed.
"""

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.prepare.input_files import (
    FilePart,
    Item,
    check_is_text,
    describe_binary,
    is_compressed,
    read_chunks,
    unpacked_suffix,
    whole_file,
)
from jaxpipe.data.prepare.records import Passages, RecordConverter
from jaxpipe.data.prepare.rows import (
    divide_arrow,
    divide_parquet,
    locate_arrow_row,
    locate_parquet_row,
    read_arrow,
    read_parquet,
)

_BLANKS = re.compile(r"[ \t\n\r]*")
_NOT_JSON = re.compile(rb"NaN|Infinity")  # Python writes these values, but JSON has none of them


@dataclass(frozen=True)
class FileFormat:
    """How a file is read.

    Attributes:
      divide: yields the parts of a file, of about a number of bytes if it can be divided.
      read: yields the records of a part.
      locate: describes the place of a record, by its number in its part; None: the file is one
        document.
    """

    divide: Callable[[Path, int], Iterator[FilePart]]
    read: Callable[[FilePart, RecordConverter], Iterator[Item]]
    locate: Callable[[FilePart, int], str] | None


def find_format(path: Path) -> FileFormat:
    """Return the format of a file; one of no known suffix is text, one document."""
    suffix = unpacked_suffix(path)
    if suffix == ".json" and _begins_with_bracket(path):
        return _ELEMENTS
    return _FORMATS.get(suffix, _TEXT)


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
        form = find_format(Path(part.path))
        for number, (load, size) in enumerate(form.read(part, self.records)):
            try:
                yield from self.records.documents(load())
            except ConfigError as error:
                raise ConfigError(f"{_describe_place(form, part, number)} {error}") from error
            except (ValueError, RecursionError, msgspec.DecodeError) as error:
                if not self.skip_bad:
                    reason = (
                        "it is nested too deeply" if isinstance(error, RecursionError) else error
                    )
                    if form is _LINES and unpacked_suffix(Path(part.path)) == ".json":
                        reason = (
                            f"{reason} (a .json file is an array, or has a record in each line)"
                        )
                    remedy = "correct it, or give --field, --ignore or --skip-bad-lines"
                    if form.locate is None:
                        remedy = "convert it to text, or take it out of the inputs"
                    raise ConfigError(
                        f"{_describe_place(form, part, number)} is no document: {reason}; {remedy}."
                    ) from error
                self.bad += 1
            self.advance(size)


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


def _read_text(part: FilePart, _: RecordConverter) -> Iterator[Item]:
    content = b"".join(chunk for chunk, _ in read_chunks(Path(part.path)))
    yield partial(_decode_text, Path(part.path), content), part.size


def _decode_text(path: Path, content: bytes) -> str:
    if name := describe_binary(path, content) or ("binary data" if b"\0" in content else ""):
        raise ValueError(f"it is {name}")
    return str(content, "utf-8-sig")


def _divide_lines(path: Path, size: int) -> Iterator[FilePart]:
    check_is_text(path)
    if is_compressed(path):
        yield from whole_file(path, size)
        return
    whole = path.stat().st_size
    for begin in range(0, whole, size):
        end = min(begin + size, whole)
        yield FilePart(str(path), begin, end, end - begin)


def _divide_text(path: Path, size: int) -> Iterator[FilePart]:
    """Yield the only part of a file of records that cannot be divided."""
    check_is_text(path)
    yield from whole_file(path, size)


def _read_lines(part: FilePart, _: RecordConverter) -> Iterator[Item]:
    """Yield the lines that start in a part, without empty ones."""
    path = Path(part.path)
    for line, size in _read_whole_lines(path) if is_compressed(path) else _read_plain_lines(part):
        if record := _strip_record(line):
            yield partial(_parse_json, record), size


def _strip_record(line: bytes) -> bytes:
    """Strip white space, and a BOM, which concatenated files have at any line."""
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _begins_with_bracket(path: Path) -> bool:
    """Whether the first character of a file, white space aside, opens a JSON array."""
    for chunk, _ in read_chunks(path):
        if begin := chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:1]:
            return begin == b"["
    return False


def _read_elements(part: FilePart, _: RecordConverter) -> Iterator[Item]:
    """Yield the elements of a file that is one JSON array."""
    for element, size, _line in _read_array(part):
        yield partial(_parse_json, element), size


def _read_array(part: FilePart) -> Iterator[tuple[bytes, int, int]]:
    """Yield the JSON of each array element, its bytes on disk, and the line where it starts.

    The text of the whole file is in memory, but only one record at a time.
    """
    content = b"".join(chunk for chunk, _ in read_chunks(Path(part.path)))
    line, before = 1, 0
    try:
        text = content.decode("utf-8-sig")
        scan = json.JSONDecoder().raw_decode
        at = _skip_blanks(text, _skip_blanks(text, 0) + 1)
        more = not text.startswith("]", at)
        while more:
            line += text.count("\n", before, at)
            before, (_, end) = at, scan(text, at)
            share = part.size * end // len(text) - part.size * at // len(text)
            yield text[at:end].encode(), share, line
            at = _skip_blanks(text, end)
            if more := text.startswith(",", at):
                at = _skip_blanks(text, at + 1)
        if not text.startswith("]", at) or _skip_blanks(text, at + 1) < len(text):
            raise ValueError("the array does not end behind this element")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{part.path} is no array of JSON from line {line} on ({first_line(error)}): correct "
            f"it."
        ) from error


def _skip_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _read_plain_lines(part: FilePart) -> Iterator[tuple[bytes, int]]:
    with Path(part.path).open("rb") as file:
        if part.begin:
            file.seek(part.begin - 1)
            file.readline()  # the rest of a line that starts in the part before
        at = file.tell()
        while at < part.end and (line := file.readline()):
            yield line, len(line)
            at += len(line)


def _read_whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    tail = b""
    for chunk, size in read_chunks(path):
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            yield line, size
            size = 0  # the first line of a chunk reports the bytes of all its lines
    yield tail, 0


def _read_table(delimiter: str, part: FilePart, _: RecordConverter) -> Iterator[Item]:
    """Yield the rows of CSV or TSV, whose first row names the columns; all values are text."""
    for load, size, _line in _read_cells(delimiter, part):
        yield load, size


def _read_cells(delimiter: str, part: FilePart) -> Iterator[tuple[Callable[[], Any], int, int]]:
    """Yield a function that returns a row, its bytes on disk, and the line where it ends."""
    size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        for number, (line, more) in enumerate(_read_whole_lines(Path(part.path))):
            size += more
            yield (line if number else line.removeprefix(codecs.BOM_UTF8)).decode() + "\n"

    csv.field_size_limit(sys.maxsize)
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        names = next(filter(None, rows), [])
        if len({*names}) < len(names):
            raise ValueError("a column is named twice")
        for row in filter(None, rows):
            yield partial(_name_cells, names, row), size, rows.line_num
            size = 0
    except (ValueError, csv.Error) as error:
        raise ConfigError(
            f"{part.path} is no table from line {rows.line_num} on ({first_line(error)}): correct "
            f"it."
        ) from error


def _name_cells(names: list[str], row: list[str]) -> dict[str, str]:
    if len(row) != len(names):
        raise ValueError(f"it has {len(row)} cells, but the first row names {len(names)} columns")
    return dict(zip(names, row))


def _describe_place(form: FileFormat, part: FilePart, number: int) -> str:
    """Return file and line or row of a part's document `number`, for error messages."""
    return f"{part.path}, {form.locate(part, number)}," if form.locate else part.path


def _locate_element(part: FilePart, number: int) -> str:
    _, _, line = next(islice(_read_array(part), number, None))
    return f"line {line}"


def _locate_row(delimiter: str, part: FilePart, number: int) -> str:
    _, _, line = next(islice(_read_cells(delimiter, part), number, None))
    return f"line {line}"


def _locate_line(part: FilePart, number: int) -> str:
    """Return the line in the file of the part's non-empty line `number`."""
    path, before = Path(part.path), 0
    if is_compressed(path):
        lines = _read_whole_lines(path)
    else:
        before = sum(1 for _ in _read_plain_lines(FilePart(part.path, 0, part.begin, 0)))
        lines = _read_plain_lines(part)
    full = (at for at, (line, _) in enumerate(lines, 1) if _strip_record(line))
    return f"line {before + next(islice(full, number, None))}"


def _table_format(delimiter: str) -> FileFormat:
    read, locate = partial(_read_table, delimiter), partial(_locate_row, delimiter)
    return FileFormat(_divide_text, read, locate)


_TEXT = FileFormat(whole_file, _read_text, None)
_LINES = FileFormat(_divide_lines, _read_lines, _locate_line)
_ELEMENTS = FileFormat(_divide_text, _read_elements, _locate_element)
_PARQUET = FileFormat(divide_parquet, read_parquet, locate_parquet_row)
_ARROW = FileFormat(divide_arrow, read_arrow, locate_arrow_row)
_FORMATS = {
    ".jsonl": _LINES, ".ndjson": _LINES, ".jsonlines": _LINES, ".json": _LINES,
    ".csv": _table_format(","), ".tsv": _table_format("\t"),
    ".parquet": _PARQUET, ".arrow": _ARROW, ".arrows": _ARROW, ".feather": _ARROW,
}  # fmt: skip
