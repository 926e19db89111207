"""Rows of Parquet, Arrow and CSV: as they were before a table gave all rows one type."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from texts import decoded, prepared

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.input_pieces import divide_files, list_input_files
from jaxpipe.data.prepare.readers import find_format
from jaxpipe.data.prepare.records import RecordConverter

pytestmark = pytest.mark.usefixtures("in_process")


def records_of(path: Path, piece: int = 1 << 20, **options: Any) -> list[Any]:
    records = RecordConverter(**options)
    parts = [part for piece in divide_files([path], piece) for part in piece.parts]
    return [load() for part in parts for load, _ in find_format(path).read(part, records)]


def write_table(path: Path, table: pyarrow.Table) -> Path:
    match path.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=1)
        case ".arrow":
            with pyarrow.ipc.new_stream(path, table.schema) as file:
                file.write_table(table, max_chunksize=1)
        case ".feather":
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=1)
    return path


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [call("f", city="Paris", at=[1, None])]},
        ],
        "tools": [{"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}],
    },
    {
        "messages": [{"role": "assistant", "content": "x", "tool_calls": [call("g", q={"k": 3})]}],
        "tools": [{"name": "g", "parameters": {"properties": {"q": {"type": "object"}}}}],
    },
]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize("key", ["messages", "chosen"])
def test_keys_of_other_rows_are_no_nulls(tmp_path: Path, suffix: str, piece: int, key: str) -> None:
    """At any depth; nulls in lists stay. The expected rows are those that made the table."""
    rows = [{key: row["messages"], "tools": row["tools"]} for row in ROWS]
    table = pyarrow.Table.from_pylist(rows)
    assert "'city': None" in str(table.to_pylist())
    path = write_table(tmp_path / f"a{suffix}", table)
    assert records_of(path, piece, field=key) == rows


def test_maps_are_objects_and_keep_their_nulls(tmp_path: Path) -> None:
    """A map has the keys of its own row, so that its nulls were written."""
    inner = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())])
    fields = [("m", pyarrow.map_(pyarrow.string(), inner)), ("c", pyarrow.int64())]
    kind = pyarrow.list_(pyarrow.struct(fields))
    messages = pyarrow.array([[{"m": [("x", {"a": 1}), ("y", None)]}]], kind)
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"messages": messages}))
    assert records_of(path) == [{"messages": [{"m": {"x": {"a": 1}, "y": None}}]}]
    twice = pyarrow.array([[{"m": [("x", None), ("x", None)]}]], kind)
    path = write_table(tmp_path / "b.parquet", pyarrow.table({"messages": twice}))
    with pytest.raises(ConfigError, match="row 1, is no document: a map has a key twice"):
        prepared([path], tmp_path / "out")


def test_nulls_of_json_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": None, "tool_calls": [call("f", city=None)]}]}
    path.write_text(json.dumps(row))
    assert records_of(path) == [row]


@pytest.mark.skipif(not hasattr(pyarrow, "json_"), reason="this pyarrow has no JSON type")
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("known", [True, False])
def test_json_columns_are_parsed_at_any_depth(tmp_path: Path, suffix: str, known: bool) -> None:
    """As types, and as strings with the metadata that a pyarrow without the type leaves."""
    messages, tools = ROWS[0]["messages"], ROWS[0]["tools"]
    texts = pyarrow.array([json.dumps(one) for one in (*messages, *tools)])
    metadata = {"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}
    storage = pyarrow.field("item", pyarrow.string(), metadata=metadata)
    kind = pyarrow.json_() if known else storage

    def lists(begin: int, end: int) -> pyarrow.Array:
        items = texts[begin:end].cast(kind) if known else texts[begin:end]
        return pyarrow.ListArray.from_arrays([0, end - begin], items, pyarrow.list_(kind))

    whole = pyarrow.array([json.dumps(messages)])
    table = pyarrow.table(
        {"messages": lists(0, 2), "tools": lists(2, 3), "rejected": whole.cast(pyarrow.json_())}
    )
    path = write_table(tmp_path / f"a{suffix}", table)
    expected = {"messages": messages, "tools": tools, "rejected": messages}
    assert records_of(path) == [expected]
    assert records_of(path, field="rejected") == [expected]


def test_places_in_arrow_files(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b", "c"], "completion": ["x", "y", None]})
    path = write_table(tmp_path / "a.arrow", table)
    with pytest.raises(ConfigError, match=r"a\.arrow, row 3, is no document: .*'completion' is n"):
        prepared([path], tmp_path / "out", piece_size=1)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.arrow is truncated or damaged"):
        prepared([path], tmp_path / "out")
    (tmp_path / "b.parquet.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"b\.parquet\.gz is compressed as a whole, .*: unpack"):
        prepared([tmp_path / "b.parquet.gz"], tmp_path / "out")


def write_csv(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows(rows)
    path.write_bytes(file.getvalue().encode())
    return path


TEXTS = ['a "b", c', "zwei\nlines\r\nthree", "007", "日本\t🙂", "x" * 200_000]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.TSV", "\t")])
def test_csv_is_read_by_rows(tmp_path: Path, name: str, delimiter: str) -> None:
    rows = [["id", "text"], *([str(i), text] for i, text in enumerate(TEXTS)), ["9", ""]]
    path = write_csv(tmp_path / name, rows, delimiter)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n")
    manifest = prepared([path], tmp_path / "out")
    assert decoded(tmp_path / "out") == TEXTS
    assert manifest.empty == 1
    prepared([path], tmp_path / "ids", field="id")
    assert decoded(tmp_path / "ids") == [*"01234", "9"]


FAULTS = {
    "column": (
        b"id,body\n1,x\n",
        r"a\.csv, line 2, is no document: it has no field 'text', but 'i",
    ),
    "cells": (b"text\nx\n\ny,z\n", r"line 4, is no document: it has 2 cells, but the first row na"),
    "quotes": (b'text\n"x"y\n', r"a\.csv is no table from line 2 on \("),
    "end": (b'text\n"x', r"a\.csv is no table from line 2 on \(unexpected end"),
    "names": (b"text,text\nx,y\n", r"is no table from line 1 on \(a column is named twice\)"),
    "lost": (b"prompt,completion,weight\na,b,0\n", r"line 2, .* it has 'weight' beside its prompt"),
    "bytes": (b"text\n\xff\n", r"is no table from line 1 on \('utf-8' codec can't"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_csv_are_sentences(tmp_path: Path, fault: str) -> None:
    content, sentence = FAULTS[fault]
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        prepared([tmp_path / "a.csv"], tmp_path / "out")


def save_to_disk(folder: Path, texts: list[str], order: list[int]) -> None:
    """Write a folder as `Dataset.save_to_disk` of `datasets` does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(order):05}.arrow" for number in order]
    for name, text in zip(names, texts, strict=True):
        write_table(folder / name, pyarrow.table({"text": [text]}))
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text('{\n  "builder_name": "json"\n}')
    write_table(folder / "cache-0123.arrow", pyarrow.table({"text": ["a copy"]}))


def test_folders_of_datasets_are_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxpipe.data.__main__ import main

    saved = tmp_path / "saved"
    save_to_disk(saved / "train", ["one", "two", "three"], [1, 0, 2])
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    words = ["--tokenizer", "bytes", "--workers", "1", "--out"]
    assert main(["prepare", str(saved), *words, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    names = ("dataset_dict.json", "dataset_info.json", "state.json", "cache-0123.arrow")
    assert "left out beside files of records" in said
    assert all(name in said for name in names)
    assert decoded(tmp_path / "out") == ["one", "two", "three"]

    (saved / "train" / "data-00000-of-00003.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00003\.arrow, which .*state\.json lists"):
        prepared([saved], tmp_path / "none")
    state = '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'
    (saved / "train" / "state.json").write_text(state)
    with pytest.raises(ConfigError, match=r"chooses rows by _indices_data_files"):
        prepared([saved], tmp_path / "none")


def test_records_that_are_named_like_files_of_datasets_are_read(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "dataset_infos.json").write_text('{"default": {"features": {}}}')
    (hub / "state.json").write_text('{"text": "of the country"}')
    write_table(hub / "b.parquet", pyarrow.table({"text": ["b"]}))
    prepared([hub], tmp_path / "out")
    assert decoded(tmp_path / "out") == ["b", "of the country"]


SPLITS = [
    ("train/a.arrow", "test/a.arrow"), ("data/train-00000-of-00001.jsonl", "data/validation.jsonl"),
    ("train_sft.parquet", "test_sft.parquet"), ("Training/a.csv", "Dev/a.csv"),
]  # fmt: skip


@pytest.mark.parametrize("names", SPLITS)
def test_a_folder_of_several_splits_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"holds several splits, as {names[0]} and {names[1]}:"):
        list_input_files([tmp_path])
    assert len(list_input_files([tmp_path / name for name in names]).files) == 2


def test_names_that_are_not_of_splits_do_not_matter(tmp_path: Path) -> None:
    for name in ("trains.jsonl", "contest.jsonl", "train.jsonl", "latest.jsonl", "test.jsonl"):
        (tmp_path / name).touch()
    assert len(list_input_files([tmp_path]).files) == 5


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    column = pyarrow.array(["a"])
    table = pyarrow.Table.from_arrays([column, column], names=["text", "text"])
    path = write_table(tmp_path / f"a{suffix}", table)
    with pytest.raises(ConfigError, match=rf"a\{suffix} has two columns named 'text': rename"):
        records_of(path)


@pytest.mark.parametrize("field", ["", "text"])
def test_weights_beside_text_are_refused_in_a_table_too(tmp_path: Path, field: str) -> None:
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"text": ["a"], "weight": [0.5]}))
    with pytest.raises(ConfigError, match=r"row 1, .* it has 'weight' beside its text"):
        prepared([path], tmp_path / "out", field=field)
    prepared([path], tmp_path / "out", field=field, ignored=("weight",))
