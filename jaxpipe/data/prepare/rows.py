"""Rows of Parquet and Arrow files as records.

A column has one type for all rows, so a struct has the keys of every row, and those that a row
never had are null. Such nulls are left out of the structs in lists (messages, tools): they cannot
be told from nulls that someone wrote, which JSON lines keep. Elements of lists stay. A column, or
a part of one, of Arrow's extension type for JSON is parsed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.input_files import FilePart, Item, is_compressed
from jaxpipe.data.prepare.records import HARMLESS, MESSAGES, WEIGHTS, RecordConverter

_ROWS = 256  # rows read at a time
_EXTENSION = b"ARROW:extension:name"  # where a pyarrow does not know the type


def divide_parquet(path: Path, size: int) -> Iterator[FilePart]:
    """Yield a part for every row group."""
    parquet = _import("pyarrow.parquet", path)
    try:
        metadata = parquet.read_metadata(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no Parquet file, or is truncated: fetch it again.") from error
    for group in range(metadata.num_row_groups):
        yield FilePart(str(path), group, group + 1, metadata.row_group(group).total_byte_size)


def read_parquet(part: FilePart, records: RecordConverter) -> Iterator[Item]:
    """Yield the rows of row groups."""
    with (
        _damage_as_sentence(part.path),
        _import("pyarrow.parquet", part.path).ParquetFile(part.path) as file,
    ):
        columns = _choose_columns(records, file.schema_arrow, part.path)
        groups = range(part.begin, part.end)
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
            yield from _items(batch, part.size * batch.num_rows // rows)


def locate_parquet_row(part: FilePart, number: int) -> str:
    """Return which row of the file is that of a part."""
    metadata = _import("pyarrow.parquet", part.path).read_metadata(part.path)
    before = (metadata.row_group(group).num_rows for group in range(part.begin))
    return f"row {sum(before) + number + 1}"


def divide_arrow(path: Path, size: int) -> Iterator[FilePart]:
    """Yield parts of consecutive batches, of about `size` bytes."""
    begin = number = piece = 0
    with _damage_as_sentence(str(path)):
        for number, batch in enumerate(_arrow_batches(path), 1):
            piece += batch.nbytes
            if piece >= size:
                yield FilePart(str(path), begin, number, piece)
                begin, piece = number, 0
    if begin < number:
        yield FilePart(str(path), begin, number, piece)


def read_arrow(part: FilePart, records: RecordConverter) -> Iterator[Item]:
    """Yield the rows of batches."""
    with _damage_as_sentence(part.path):
        for number, batch in enumerate(_arrow_batches(Path(part.path))):
            if part.begin <= number < part.end:
                chosen = batch.select(_choose_columns(records, batch.schema, part.path))
                for start in range(0, batch.num_rows, _ROWS):
                    rows = chosen.slice(start, _ROWS)
                    yield from _items(rows, rows.nbytes)


def locate_arrow_row(part: FilePart, number: int) -> str:
    """Return which row of the file is that of a part."""
    before = islice(_arrow_batches(Path(part.path)), part.begin)
    return f"row {sum(batch.num_rows for batch in before) + number + 1}"


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream."""
    arrow = _import("pyarrow", path)
    ipc = _import("pyarrow.ipc", path)
    with arrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            with ipc.open_file(source) as file:
                yield from map(file.get_batch, range(file.num_record_batches))
            return
        source.seek(0)
        with ipc.open_stream(source) as stream:
            yield from stream


def _import(module: str, path: Path | str) -> Any:
    if is_compressed(Path(path)):
        raise ConfigError(
            f"{path} is compressed as a whole, and rows are read from its end: unpack it (Parquet "
            f"and Arrow compress within)."
        )
    return import_optional(module, f"reading {path}")


@contextmanager
def _damage_as_sentence(path: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is truncated or damaged ({first_line(error)}): fetch it again."
        ) from error


def _items(batch: Any, size: int) -> Iterator[Item]:
    """Yield the rows of a batch; the first one reports the bytes of all."""
    readers = {field.name: _value_reader(field, in_list=False) for field in batch.schema}
    for row in batch.to_pylist():
        yield partial(_record, row, readers), size
        size = 0


_Reader = Callable[[Any], Any]


def _record(row: dict[str, Any], readers: dict[str, _Reader | None]) -> dict[str, Any]:
    return {name: _read(value, readers[name]) for name, value in row.items()}


def _read(value: Any, reader: _Reader | None) -> Any:
    return value if value is None or reader is None else reader(value)


def _value_reader(field: Any, *, in_list: bool) -> _Reader | None:
    """Return the function of a field's values other than null; None: they stay as they are."""
    kind = field.type
    if _is_json(field):
        return json.loads
    kind = getattr(kind, "storage_type", kind)
    if hasattr(kind, "item_field"):  # a map, which has the keys of its own row only
        return partial(_read_map, _value_reader(kind.item_field, in_list=True))
    if hasattr(kind, "value_field"):
        reader = _value_reader(kind.value_field, in_list=True)
        return reader and (lambda values: [_read(value, reader) for value in values])
    if not (hasattr(kind, "get_field_index") and kind.num_fields):
        return None
    readers = {one.name: _value_reader(one, in_list=in_list) for one in kind}
    if not in_list:
        return partial(_record, readers=readers)
    return lambda row: {
        name: _read(value, readers[name]) for name, value in row.items() if value is not None
    }


def check_column_names(names: list[str], path: Path | str) -> None:
    """Raise `ConfigError` where a table has two columns of one name."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"{path} has two columns named {twice[0]!r}: rename or drop one of them.")


def _is_json(field: Any) -> bool:
    named = (field.metadata or {}).get(_EXTENSION, b"").decode()
    return "arrow.json" in (getattr(field.type, "extension_name", ""), named)


def _read_map(reader: _Reader | None, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values = {key: _read(value, reader) for key, value in pairs}
    if len(values) < len(pairs):
        raise ValueError(f"a map has a key twice, of {', '.join(map(repr, values))}")
    return values


def _choose_columns(records: RecordConverter, schema: Any, path: str) -> list[str]:
    """Return the columns to read: only the text's own, or for messages all that are not ignored."""
    names, field = schema.names, records.field
    check_column_names(names, path)
    weights = [name for name in names if name in WEIGHTS]
    if field:
        top, *inner = [field] if field in names else field.split(".")
        column: Any = schema.field(top) if top in names else None
        for name in inner:  # fields of nested structs
            kind = column and column.type
            index = kind.get_field_index(name) if hasattr(kind, "get_field_index") else -1
            column = kind.field(index) if index >= 0 else None
        if column is None or _is_json(column):
            return names  # the error for a missing field names the existing ones
        if not hasattr(column.type, "value_field"):  # it is no list, so it has no messages
            return [top, *(name for name in weights if name != top)]
    elif "text" in names and not records.pairs and not any(name in names for name in MESSAGES):
        return [name for name in ("text", "prompt", "completion", *weights) if name in names]
    own = {field, field.split(".")[0]}
    return [name for name in names if name in own or name not in HARMLESS | records.ignored]
