"""Shards in Parquet: a column of lists of token ids, each a document.

What can be read of it is a row group, so a sample costs the reading of one or two. How many tokens
a row group has stands in the file's footer.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import needed
from jaxpipe.data.tokens import IdFile

COLUMNS = ("input_ids", "tokens")  # the column's name where there are several of lists
_KEPT = 4  # row groups of a shard that stay in memory

Group = tuple[np.ndarray, np.ndarray]  # ids [tokens], and ends of the documents among them


@dataclass(frozen=True)
class ParquetShard:
    """A Parquet file of documents."""

    path: Path
    starts: tuple[int, ...]  # of the row groups, in tokens, and the end of the last
    group: Callable[[int], Group]
    digest: str
    vouched: bool = False
    whole_digest: None = None

    @property
    def size(self) -> int:
        """Tokens in it."""
        return self.starts[-1]

    def lengths(self) -> np.ndarray:
        """Tokens of every document; reads the whole file."""
        groups = range(len(self.starts) - 1)
        return np.concatenate([np.diff(self.group(number)[1], prepend=0) for number in groups])

    def document_start(self, token: int) -> int:
        """Where the document with this token begins."""
        number = bisect.bisect_right(self.starts, token) - 1
        start, ends = self.starts[number], self.group(number)[1]
        before = np.searchsorted(ends, token - start, side="right")
        return start + (int(ends[before - 1]) if before else 0)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids of the tokens from `begin` to `end`."""
        number, parts = bisect.bisect_right(self.starts, begin) - 1, []
        while begin < end:
            start = self.starts[number]
            parts.append(self.group(number)[0][begin - start : end - start])
            number += 1
            begin = self.starts[number]
        return np.concatenate(parts)

    def counted(self, begin: int, end: int) -> None:
        """None: all count in the loss."""


def open_parquet(path: Path) -> ParquetShard:
    """Open a Parquet file by its footer.

    Raises `ConfigError` where it is none, or has no column of lists of integers, or several of
    which none is named `input_ids` or `tokens`; and as it is read where a row group has other
    tokens than its footer says.
    """
    parquet = needed("pyarrow.parquet", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no Parquet file, or is truncated: write it again.") from error
    column = _column(path, schema)
    chunks = [
        next(
            chunk
            for index in range(metadata.num_columns)
            if (chunk := metadata.row_group(number).column(index)).path_in_schema.split(".")[0]
            == column
        )
        for number in range(metadata.num_row_groups)
    ]
    sizes = [(chunk.statistics or chunk).num_values for chunk in chunks]

    @lru_cache(_KEPT)
    def group(number: int) -> Group:
        try:  # a file of its own, for one is not for several threads
            with parquet.ParquetFile(path, metadata=metadata) as file:
                lists = file.read_row_group(number, columns=[column])[column].combine_chunks()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"row group {number} of {path} cannot be read ({first_line(error)}): write it "
                f"again."
            ) from error
        ids = lists.flatten().to_numpy(zero_copy_only=False)
        if len(ids) != sizes[number] or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"row group {number} of {path} has lists that are empty or hold nulls, and no "
                f"statistics that tell: write it without these."
            )
        lengths = np.diff(lists.offsets.to_numpy())
        return ids, np.cumsum(lengths[lengths > 0])

    stored = IdFile(path, np.dtype("u1"), 0, path.stat().st_size)
    return ParquetShard(path, tuple(accumulate(sizes, initial=0)), group, stored.sampled_digest())


def _column(path: Path, schema: Any) -> str:
    """The name of the column with the ids."""
    types = needed("pyarrow.types", f"reading {path}")
    lists = [
        field.name
        for field in schema
        if (types.is_list(field.type) or types.is_large_list(field.type))
        and types.is_integer(field.type.value_type)
    ]
    chosen = [name for name in COLUMNS if name in lists] or lists
    if chosen == lists and len(lists) != 1:
        raise ConfigError(
            f"{path} has {len(lists)} columns of lists of integers, and none named "
            f"{' or '.join(COLUMNS)}: give the ids that name."
        )
    return chosen[0]
