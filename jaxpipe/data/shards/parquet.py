"""Parquet shards: a column of lists of token ids, each list a document or several.

The unit of reading is a row group, so a sample costs reading one or two of them. The file's footer
gives the number of tokens of each row group. Other columns may mark the tokens that count in the
loss: masks of 0 and 1, or `labels`, which equal the ids, or -100 for tokens that do not count. Or
they say where the documents of a packed row begin (`packed_rows`). A column that may say something
else of the ids is refused.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.records import HARMLESS
from jaxpipe.data.prepare.rows import check_column_names
from jaxpipe.data.shards.packed_rows import BORDERS, LENGTHS, find_document_ends
from jaxpipe.data.shards.tokens import IdFile
from jaxpipe.model.loss import IGNORE

COLUMNS = ("input_ids", "tokens")  # names of the id column where several columns have lists
# A token counts in the loss if every mask column of the file marks it.
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
# Columns that are read only to refuse rows with other values, and the value that they may have.
CONSTANT = {"attention_mask": 1, "token_type_ids": 0}
COUNTS = ("length", "seq_len", "seq_length")  # integers, which are the number of a row's ids
# Columns beside ids that do not change what is trained; so are all that hold a string or a time.
UNREAD = HARMLESS | {"text", "special_tokens_mask", "__index_level_0__"}
_KEPT = 4  # row groups per shard that are cached in memory


class RowGroupTokens(NamedTuple):
    """Tokens of a row group."""

    ids: np.ndarray  # integers [tokens]
    ends: np.ndarray  # integers [documents]: cumulative tokens at the end of each document
    counted: np.ndarray | None  # bool [tokens]: whether a token counts in the loss; None: all do


@dataclass(frozen=True)
class ParquetShard:
    """A Parquet file of documents."""

    path: Path
    starts: tuple[int, ...]  # first token of every row group, and the end of the last one
    group: Callable[[int], RowGroupTokens]  # reads a row group by its number
    masked: bool
    digest: str
    vouched: bool = False
    whole_digest: None = None

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.starts[-1]

    def lengths(self) -> np.ndarray:
        """Return the tokens of every document; reads the whole file."""
        groups = range(len(self.starts) - 1)
        return np.concatenate([np.diff(self.group(number).ends, prepend=0) for number in groups])

    def document_start(self, token: int) -> int:
        """Return the first token of the document that contains this token."""
        number = bisect.bisect_right(self.starts, token) - 1
        start, ends = self.starts[number], self.group(number).ends
        before = np.searchsorted(ends, token - start, side="right")
        return start + (int(ends[before - 1]) if before else 0)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the ids of the tokens from `begin` to `end`."""
        return np.concatenate([group.ids[part] for group, part in self._within(begin, end)])

    def counted(self, begin: int, end: int) -> np.ndarray | None:
        """Return which of these tokens count in the loss, bool `[end - begin]`; None: all."""
        if not self.masked:
            return None
        parts = ((group.counted, part) for group, part in self._within(begin, end))
        return np.concatenate([counted[part] for counted, part in parts if counted is not None])

    def _within(self, begin: int, end: int) -> Iterator[tuple[RowGroupTokens, slice]]:
        """Yield the row groups that overlap a range of tokens, and the range in each group."""
        number = bisect.bisect_right(self.starts, begin) - 1
        while begin < end:
            start = self.starts[number]
            yield self.group(number), slice(begin - start, end - start)
            number += 1
            begin = self.starts[number]


def open_parquet(path: Path, ignored: frozenset[str] = frozenset()) -> ParquetShard:
    """Open a Parquet file by its footer.

    `ignored` has names of columns that are left out although they may change what is trained.

    Raises `ConfigError` where it is no Parquet file, has no column of lists of integers, or has
    several and none is named `input_ids` or `tokens`, or has a column that is not known. Reading it
    later raises where the tokens of a row group differ in number from its footer, are padded, or do
    not match their masks or borders.
    """
    parquet = import_optional("pyarrow.parquet", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no Parquet file, or is truncated: write it again.") from error
    column, known = _choose_columns(path, schema, ignored)
    masks = [name for name in MASKS if name in known]
    borders = [name for name in (LENGTHS, *BORDERS) if name in known]
    counts = [name for name in COUNTS if name in schema.names and name not in ignored]
    chunks = [
        next(
            chunk
            for index in range(metadata.num_columns)
            if (chunk := metadata.row_group(number).column(index)).path_in_schema.startswith(
                f"{column}."
            )
        )
        for number in range(metadata.num_row_groups)
    ]
    sizes = [(chunk.statistics or chunk).num_values for chunk in chunks]
    groups = _RowGroups(path, metadata, column, tuple(known), tuple(counts), tuple(sizes))
    digest = IdFile(path, np.dtype("u1"), 0, path.stat().st_size).sampled_digest()
    # The same ids with a loss mask or other borders are other samples.
    digest += f" {'+'.join([*masks, *borders])}" if masks or borders else ""
    starts = tuple(accumulate(sizes, initial=0))
    return ParquetShard(path, starts, lru_cache(_KEPT)(groups.read), bool(masks), digest)


@dataclass(frozen=True)
class _RowGroups:
    """The row groups of a Parquet file.

    Attributes:
      path: of the file.
      metadata: of its footer.
      column: name of the column with the ids.
      known: names of the columns read beside it, `counts` of those with the number of a row's ids.
      sizes: tokens of every row group.
    """

    path: Path
    metadata: Any
    column: str
    known: tuple[str, ...]
    counts: tuple[str, ...]
    sizes: tuple[int, ...]

    def read(self, number: int) -> RowGroupTokens:
        """Read a row group; raises `ConfigError` as `open_parquet` says."""
        place = f"row group {number} of {self.path}"
        table = self._table(number)
        ids, lengths = _flatten(table[self.column])
        if len(ids) != self.sizes[number] or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"{place} has lists that are empty or hold nulls, and no statistics that tell: "
                f"write it without these."
            )
        for name in self.counts:
            if (other := table[name].to_numpy() != lengths).any():
                row = int(other.argmax())
                raise ConfigError(
                    f"{place}, row {row + 1}: {name} is {table[name][row]} for {lengths[row]} ids, "
                    f"which may be padded: write them without, or leave it out by "
                    f"data.ignore_columns='[\"{name}\"]'."
                )
        counted = np.ones(len(ids), bool)
        read = {name: _flatten(table[name]) for name in self.known}
        for name, (values, other_lengths) in read.items():
            fault = name != LENGTHS and _describe_fault(name, values, other_lengths, ids, lengths)
            if fault:
                raise ConfigError(f"{place}, {fault}.")
            if name in MASKS:
                counted &= values != IGNORE if name == "labels" else values != 0
        borders = {name: read[name] for name in (LENGTHS, *BORDERS) if name in read}
        try:
            ends = find_document_ends(borders, ids, lengths)
        except ValueError as fault:
            raise ConfigError(f"{place}, {fault}.") from fault
        return RowGroupTokens(ids, ends, None if read.keys().isdisjoint(MASKS) else counted)

    def _table(self, number: int) -> Any:
        parquet = import_optional("pyarrow.parquet", f"reading {self.path}")
        columns = [self.column, *self.known, *self.counts]
        try:  # open the file anew, because a ParquetFile is not thread-safe
            with parquet.ParquetFile(self.path, metadata=self.metadata) as file:
                return file.read_row_group(number, columns=columns)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"row group {number} of {self.path} cannot be read ({first_line(error)}): write it "
                f"again."
            ) from error


def _flatten(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a column of lists, and the length of each row's list; null: 0."""
    compute = import_optional("pyarrow.compute", "reading Parquet")
    lists = column.combine_chunks()
    values = compute.list_flatten(lists).to_numpy(zero_copy_only=False)
    lengths = compute.fill_null(compute.list_value_length(lists), 0)
    return values, lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def _describe_fault(
    name: str, values: np.ndarray, other_lengths: np.ndarray, ids: np.ndarray, lengths: np.ndarray
) -> str:
    """Describe why a column, with lists of `other_lengths`, does not fit the ids, or return ""."""
    if (other := other_lengths != lengths).any():
        row = int(other.argmax())
        return (
            f"row {row + 1}: {name} has {other_lengths[row]} values for {lengths[row]} ids: write "
            f"both alike"
        )
    if name in BORDERS:
        return ""
    if name == "labels":
        wrong = (values != IGNORE) & (values != ids)
        allowed = f"the id itself or {IGNORE}; labels that are moved by one token are not read"
    elif name in CONSTANT:
        wrong = values != CONSTANT[name]
        allowed = f"{CONSTANT[name]}, for a row is taken as text without kinds of tokens or padding"
    else:
        wrong, allowed = (values != 0) & (values != 1), "0 or 1"
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    return f"row {row + 1}: {name} is {values[at]} beside the id {ids[at]}, and must be {allowed}"


def _choose_columns(path: Path, schema: Any, ignored: frozenset[str]) -> tuple[str, list[str]]:
    """Return the name of the column with the ids, and those of the columns read beside it."""
    types = import_optional("pyarrow.types", f"reading {path}")
    check_column_names(schema.names, path)
    kinds = {field.name: _value_type(field.type) for field in schema if field.name not in ignored}
    known = [name for name in (*MASKS, *CONSTANT, LENGTHS, *BORDERS) if name in kinds]
    for name in known:
        kind = kinds.pop(name)
        number = kind is not None and (types.is_boolean(kind) or types.is_integer(kind))
        if not (number or (kind and types.is_floating(kind) and name in MASKS)):
            raise ConfigError(
                f"{path} has a column {name} of {schema.field(name).type}, but beside ids it is "
                f"lists of numbers, one for each id or document: write it so, or drop it."
            )
    lists = [
        name
        for name, kind in kinds.items()
        if kind is not None and types.is_integer(kind) and name not in UNREAD
    ]
    named = [name for name in COLUMNS if name in lists]
    if not named and len(lists) != 1:
        raise ConfigError(
            f"{path} has {len(lists)} columns of lists of integers, and none named "
            f"{' or '.join(COLUMNS)}: give the ids that name, or turn text into ids with "
            f"`python -m jaxpipe.data prepare`."
        )
    column = (named or lists)[0]
    for name in (one for one in kinds if one != column and one.split(".")[-1] not in UNREAD):
        kind = schema.field(name).type
        if not (
            (name in COUNTS and types.is_integer(kind))
            or _is_text(kind)
            or types.is_temporal(kind)
            or types.is_null(kind)
        ):
            raise ConfigError(
                f"{path} has a column {name} of {kind} beside {column}, and it is not known "
                f"whether it changes what is trained: drop it, or leave it out by "
                f"data.ignore_columns='[\"{name}\"]'."
            )
    return column, known


def _is_text(kind: Any) -> bool:
    types = import_optional("pyarrow.types", "reading Parquet")
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _value_type(kind: Any) -> Any:
    """Return the value type of any kind of list, or None for a type that is no list."""
    types = import_optional("pyarrow.types", "reading Parquet")
    tests = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    return kind.value_type if any(getattr(types, f"is_{test}")(kind) for test in tests) else None
