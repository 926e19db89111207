"""Columns beside token ids: borders of packed rows, and columns that nobody knows."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxpipe.config import ConfigError, DataConfig
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.data.sources import open_data

ROWS = [[1, 2, 3, 4, 5], [6, 7], [], [8, 9, 10]]
LENGTHS = [[3, 2], [2], [], [1, 2]]
DOCUMENTS = [3, 2, 2, 1, 2]
COLUMNS: dict[str, list[Any]] = {
    "seq_lengths": LENGTHS,
    "position_ids": [[0, 1, 2, 0, 1], [0, 1], [], [0, 0, 1]],
    "seq_idx": [[0, 0, 0, 1, 1], [0, 0], [], [0, 1, 1]],
    "document_ids": [[7, 7, 7, 9, 9], [9, 9], [], [9, 10, 10]],
    "segment_ids": [[1, 1, 1, 2, 2], [1, 1], [], [1, 2, 2]],
}


def write(path: Path, **columns: Any) -> str:
    """Write row groups of two rows."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return str(path)


@pytest.mark.parametrize("names", [*([name] for name in COLUMNS), [*COLUMNS]])
def test_a_packed_row_is_its_documents(tmp_path: Path, names: list[str]) -> None:
    columns = {name: COLUMNS[name] for name in names}
    documents = open_documents(write(tmp_path / "a.parquet", input_ids=ROWS, **columns), 11)
    assert documents.lengths.tolist() == DOCUMENTS
    assert documents.tokens(1).tolist() == [4, 5]
    assert documents.split(0.2)[1].begin == 8  # no document is divided
    whole = open_documents(write(tmp_path / "b.parquet", input_ids=ROWS), 11)
    assert whole.lengths.tolist() == [5, 2, 3]
    assert whole.fingerprint != documents.fingerprint


def test_masks_and_borders_together(tmp_path: Path) -> None:
    mask = [[0, 1, 1, 0, 1], [0, 0], [], [1, 1, 0]]
    columns = {"seq_lengths": LENGTHS, "loss_mask": mask}
    documents = open_documents(write(tmp_path / "a.parquet", input_ids=ROWS, **columns), 11)
    assert documents.counted(1).tolist() == [False, True]
    assert documents.counted_in_stream(0, 10).tolist() == np.concatenate(mask).astype(bool).tolist()


def changed(name: str, row: int, values: list[int]) -> dict[str, list[Any]]:
    return {name: [*COLUMNS[name][:row], values, *COLUMNS[name][row + 1 :]]}


FAULTS = {
    "sum": (changed("seq_lengths", 1, [1]), r"group 0 of .*, row 2: seq_lengths must be lengths"),
    "zero": (changed("seq_lengths", 3, [0, 3]), r"group 1 of .*, row 2: seq_lengths must be len"),
    "offset": (changed("position_ids", 1, [3, 4]), r"group 0 .*, row 2: position_ids must count"),
    "jump": (changed("position_ids", 0, [0, 1, 2, 4, 5]), r"row 1: position_ids must count from 0"),
    "padding": (changed("segment_ids", 0, [1, 1, 1, 2, 0]), r"row 1: segment_ids must not fall wi"),
    "short": (changed("seq_idx", 3, [0]), r"group 1 .*, row 2: seq_idx has 1 values for 3 ids"),
    "two": (
        {"seq_lengths": LENGTHS} | changed("seq_idx", 0, [0] * 5),
        r"row 1: seq_idx names other documents than seq_lengths",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_borders_that_do_not_fit_are_refused_by_row(tmp_path: Path, fault: str) -> None:
    columns, sentence = FAULTS[fault]
    documents = open_documents(write(tmp_path / "a.parquet", input_ids=ROWS, **columns), 11)
    with pytest.raises(ConfigError, match=sentence):
        documents.stream(0, len(documents))


UNKNOWN: dict[str, list[Any]] = {
    "cu_seqlens": [[0, 3, 5], [0, 2], [0], [0, 1, 3]],
    "loss_weights": [[0.5] * 5, [1.0] * 2, [], [0.0] * 3],
    "prompt_length": [2, 1, 0, 1],
    "advantage": [0.5, 1.0, 0.0, -1.0],
    "packed": [True, False, False, True],
    "spans": [[{"begin": 0, "end": 2}]] * 4,
    "tokens": ROWS,
    "prompt_ids": ROWS,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_columns_that_nobody_knows_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.parquet", input_ids=ROWS, **{name: UNKNOWN[name]})
    with pytest.raises(
        ConfigError, match=rf"has a column {name} of .* data\.ignore_columns='\[\"{name}\"\]'"
    ):
        open_documents(path, 11)
    assert open_documents(path, 11, frozenset({name})).lengths.tolist() == [5, 2, 3]
    config = DataConfig(source="file", path=path, ignore_columns=(name,), heldout_fraction=0.3)
    open_data(config, seq_len=2, vocab_size=11, seed=0, directory=tmp_path)


def test_harmless_columns_are_not_read(tmp_path: Path) -> None:
    columns = {
        "id": [1, 2, 3, 4], "text": ["a"] * 4, "url": ["b"] * 4, "length": [5, 2, 0, 3],
        "token_count": [6, 3, 1, 4], "file": ["c"] * 4, "written": [datetime.date(2026, 1, 1)] * 4,
        "nothing": [None] * 4, "special_tokens_mask": [[1] * 5, [1] * 2, [], [1] * 3],
        "metadata": [{"x": 1}] * 4,
    }  # fmt: skip
    documents = open_documents(write(tmp_path / "a.parquet", input_ids=ROWS, **columns), 11)
    assert documents.lengths.tolist() == [5, 2, 3]


def test_borders_of_another_type_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", input_ids=ROWS, position_ids=[0, 1, 2, 3])
    with pytest.raises(ConfigError, match="has a column position_ids of int64, but beside ids it"):
        open_documents(path, 11)
