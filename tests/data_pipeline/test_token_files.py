"""Token files of other tools: llm.c's header, Parquet's lists and masks, and file names."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.samples import StreamSamples
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.token_files import open_documents

HEADERS = [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
DOCUMENTS = [[5, 6, 7], [8, 9, 1], [2, 3, 4], [9, 9, 8], [1, 2, 3]]
IDS = np.concatenate(DOCUMENTS)
# Two masks of documents: neither contains the other, nor is the same in every row.
SOME = [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]]
OTHER = [[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 1, 1], [1, 1, 1]]
LABELS = [
    [token if counted else -100 for token, counted in zip(*row, strict=True)]
    for row in zip(DOCUMENTS, SOME, strict=True)
]


def write_llmc(path: Path, magic: int, version: int, ids: np.ndarray) -> str:
    """Write 256 int32, three of them in use, then the ids, as llm.c's `write_datafile` does."""
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + ids.tobytes())
    return str(path)


def write_parquet(path: Path, **columns: Any) -> str:
    """Write row groups of two rows."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return str(path)


def every_id(path: str, vocab_size: int) -> np.ndarray:
    documents = open_documents(path, vocab_size)
    return documents.stream(0, len(documents))


def assert_counted(documents: ShardedDocuments, counted: np.ndarray) -> None:
    """Check the mask of the whole stream, of each document and of the targets of samples."""
    np.testing.assert_array_equal(documents.stream(0, len(documents)), IDS)
    np.testing.assert_array_equal(documents.counted_in_stream(0, len(documents)), counted)
    for index, expected in enumerate(counted.reshape(len(DOCUMENTS), 3)):
        np.testing.assert_array_equal(documents.counted(index), expected)
    samples = StreamSamples(documents, 7)
    targets = np.concatenate([samples[index]["targets"] for index in range(len(samples))])
    np.testing.assert_array_equal(targets, np.where(counted, IDS, -100)[1:])


@pytest.mark.parametrize(("magic", "version", "dtype"), HEADERS)
@pytest.mark.parametrize("sidecar", [False, True])
def test_llmc_files_are_read_without_their_header(
    tmp_path: Path, magic: int, version: int, dtype: str, sidecar: bool
) -> None:
    """The header alone determines the type, whatever a sidecar has; ids up to the largest."""
    largest = min(np.iinfo(dtype).max, 2**31 - 2)
    ids = np.array([*range(700), largest, 0, 20240520 % largest, 3], dtype)
    path = write_llmc(tmp_path / "fineweb_train_000001.bin", magic, version, ids)
    if sidecar:
        (tmp_path / "fineweb_train_000001.json").write_text('{"dtype": "uint8"}')
    got = every_id(path, largest + 1)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, ids)


def test_llmc_files_of_a_folder_are_one_stream(tmp_path: Path) -> None:
    """Shards of modded-nanogpt (magic 20240520), in the order of their names."""
    parts = [np.arange(begin, begin + 50, dtype="<u2") for begin in (0, 50, 100)]
    for number in (2, 0, 1):
        write_llmc(tmp_path / f"train_{number:06}.bin", 20240520, 1, parts[number])
    np.testing.assert_array_equal(every_id(str(tmp_path), 150), np.arange(150))
    np.testing.assert_array_equal(every_id(str(tmp_path / "train_*.bin"), 150), np.arange(150))


@pytest.mark.parametrize(("magic", "version"), [(20240520, 2), (20240801, 1), (20240801, 8)])
def test_llmc_of_another_version_is_refused_by_name(
    tmp_path: Path, magic: int, version: int
) -> None:
    path = write_llmc(tmp_path / "a.bin", magic, version, np.arange(9, dtype="<u2"))
    with pytest.raises(ConfigError, match=rf"a\.bin begins .* llm\.c.* version {version}, which"):
        open_documents(path, 100)


@pytest.mark.parametrize("cut", [-2, 2])
def test_llmc_of_another_size_than_its_header_says_is_refused(tmp_path: Path, cut: int) -> None:
    path = Path(write_llmc(tmp_path / "a.bin", 20240520, 1, np.arange(9, dtype="<u2")))
    content = path.read_bytes()
    path.write_bytes(content[:cut] if cut < 0 else content + bytes(cut))
    with pytest.raises(
        ConfigError, match=rf"a\.bin .*9 tokens of uint16, which is 1042 bytes.* {1042 + cut}:"
    ):
        open_documents(str(path), 100)


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(pyarrow.int32()),
        pyarrow.list_(pyarrow.uint8()),
        pyarrow.large_list(pyarrow.uint16()),
        pyarrow.list_(pyarrow.int64(), 3),
        pyarrow.list_view(pyarrow.int32()),
        pyarrow.large_list_view(pyarrow.uint32()),
    ],
    ids=str,
)
def test_every_type_of_list_is_read(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """With rows that are null, and empty where the type allows; for ids and their mask."""
    rows: list[list[int] | None] = [*DOCUMENTS[:2], None, *DOCUMENTS[2:]]
    mask: list[list[int] | None] = [*SOME[:2], None, *SOME[2:]]
    ragged = not pyarrow.types.is_fixed_size_list(kind)
    if ragged:
        rows, mask = [[], *rows, [7]], [[], *mask, [1]]
    try:
        path = write_parquet(
            tmp_path / "a.parquet",
            input_ids=pyarrow.array(rows, kind),
            loss_mask=pyarrow.array(mask, kind),
        )
    except pyarrow.ArrowNotImplementedError:
        pytest.skip("this pyarrow does not write such lists")
    assert pyarrow.parquet.read_schema(path).field("input_ids").type.id == kind.id
    documents = open_documents(path, 10)
    np.testing.assert_array_equal(documents.lengths, [3] * 5 + [1] * ragged)
    size = len(IDS) + ragged
    np.testing.assert_array_equal(documents.stream(0, size), [*IDS, 7][:size])
    counted = np.array([*np.concatenate(SOME), 1][:size], bool)
    np.testing.assert_array_equal(documents.counted_in_stream(0, size), counted)
    for begin, end in [(1, 2), (2, 7), (5, 6), (4, 15)]:  # within row groups, and across them
        np.testing.assert_array_equal(documents.stream(begin, end), IDS[begin:end])
        np.testing.assert_array_equal(documents.counted_in_stream(begin, end), counted[begin:end])


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize(
    "value", [pyarrow.int8(), pyarrow.int64(), pyarrow.bool_(), pyarrow.float32()], ids=str
)
def test_a_mask_says_what_counts(tmp_path: Path, name: str, value: pyarrow.DataType) -> None:
    mask = pyarrow.array(SOME).cast(pyarrow.list_(value))
    path = write_parquet(tmp_path / "a.parquet", input_ids=DOCUMENTS, **{name: mask})
    assert_counted(open_documents(path, 10), np.concatenate(SOME) == 1)


def test_labels_are_a_mask(tmp_path: Path) -> None:
    """-100 does not count, the id itself does."""
    path = write_parquet(tmp_path / "a.parquet", input_ids=DOCUMENTS, labels=LABELS)
    assert_counted(open_documents(path, 10), np.concatenate(LABELS) != -100)


def test_a_token_counts_in_all_masks_or_not_at_all(tmp_path: Path) -> None:
    """And an `attention_mask` of ones changes nothing."""
    path = write_parquet(
        tmp_path / "a.parquet",
        input_ids=DOCUMENTS,
        labels=LABELS,
        completion_mask=OTHER,
        attention_mask=np.ones_like(DOCUMENTS).tolist(),
    )
    counted = (np.concatenate(LABELS) != -100) & (np.concatenate(OTHER) == 1)
    assert 0 < counted.sum() < min(np.sum(SOME), np.sum(OTHER))
    assert_counted(open_documents(path, 10), counted)


def changed(rows: list[list[int]], row: int, values: list[int]) -> list[list[int]]:
    return [*rows[:row], values, *rows[row + 1 :]]


FAULTS = {
    "padding": (
        {"attention_mask": changed([[1, 1, 1]] * 5, 3, [1, 1, 0])},
        r"row group 1 of .*a\.parquet, row 2: attention_mask is 0 beside the id 8, .* padding\.$",
    ),
    "kinds of tokens": (
        {"token_type_ids": changed([[0, 0, 0]] * 5, 0, [0, 1, 1])},
        r"row group 0 of .*a\.parquet, row 1: token_type_ids is 1 beside the id 6, and must be 0",
    ),
    "shifted labels": (
        {"labels": [[*row[1:], -100] for row in DOCUMENTS]},
        r"row group 0 of .*a\.parquet, row 1: labels is 6 beside the id 5, .* moved by one token",
    ),
    "one shifted row": (
        {"labels": changed(LABELS, 4, [2, 3, -100])},
        r"row group 2 of .*a\.parquet, row 1: labels is 2 beside the id 1, .* moved by one token",
    ),
    "short mask": (
        {"loss_mask": changed(SOME, 2, [0, 1])},
        r"row group 1 of .*a\.parquet, row 1: loss_mask has 2 values for 3 ids",
    ),
    "length": (
        {"length": [3, 3, 3, 2, 3]},
        r"row group 1 of .*a\.parquet, row 2: length is 2 for 3 ids, which may be padded",
    ),
    "weights": (
        {"loss_mask": changed(SOME, 1, [0, 2, 1])},
        r"row group 0 of .*a\.parquet, row 2: loss_mask is 2 beside the id 9, and must be 0 or 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mask_that_does_not_fit_is_refused_by_row(tmp_path: Path, fault: str) -> None:
    columns, sentence = FAULTS[fault]
    path = write_parquet(tmp_path / "a.parquet", input_ids=DOCUMENTS, **columns)
    documents = open_documents(path, 10)
    with pytest.raises(ConfigError, match=sentence):
        documents.stream(0, len(documents))

    if fault == "kinds of tokens":
        assert open_documents(path, 10, frozenset({"token_type_ids"})).lengths.tolist() == [3] * 5


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pyarrow.array(DOCUMENTS)
    table = pyarrow.Table.from_arrays([column, column], names=["input_ids", "input_ids"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet has two columns named 'input_ids': rename"):
        open_documents(str(tmp_path), 10)


@pytest.mark.parametrize("name", ["b.bin.zst", "b.arrow", "b.mds", "b.parquet.gz", "b.npz"])
def test_a_folder_is_not_read_in_part(tmp_path: Path, name: str) -> None:
    write_parquet(tmp_path / "a.parquet", input_ids=DOCUMENTS)
    (tmp_path / "README.md").write_text("about")
    assert len(every_id(str(tmp_path), 10)) == len(IDS)
    (tmp_path / name).write_bytes(b"ids")
    with pytest.raises(ConfigError, match=rf"{name} is not read, unlike a\.parquet beside it"):
        open_documents(str(tmp_path), 10)


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("fineweb_train_000001", "fineweb_val_000000"):
        write_llmc(tmp_path / f"{name}.bin", 20240520, 1, np.arange(9, dtype="<u2"))
    with pytest.raises(ConfigError, match=r"several splits, as fineweb_train_000001\.bin and fine"):
        open_documents(str(tmp_path), 10)
    assert len(every_id(str(tmp_path / "fineweb_train_*.bin"), 10)) == 9


@pytest.mark.parametrize("name", ["a.BIN", "a.Bin"])
@pytest.mark.parametrize("through", ["file", "folder", "pattern"])
def test_bin_in_capitals_must_be_renamed(tmp_path: Path, name: str, through: str) -> None:
    """Its `.idx`, `.json` or `.mask` sidecar would not be found by its name."""
    write_llmc(tmp_path / name, 20240520, 1, np.arange(9, dtype="<u2"))
    path = {"file": tmp_path / name, "folder": tmp_path, "pattern": tmp_path / "a.*"}[through]
    with pytest.raises(ConfigError, match=rf"{name[:1]}\{name[1:]} is named .*: rename"):
        open_documents(str(path), 100)


@pytest.mark.parametrize("name", ["a.NPY", "a.PARQUET"])
def test_other_suffixes_may_be_in_capitals(tmp_path: Path, name: str) -> None:
    if name == "a.NPY":
        with (tmp_path / name).open("wb") as file:
            np.save(file, IDS)
    else:
        write_parquet(tmp_path / name, input_ids=DOCUMENTS)
    np.testing.assert_array_equal(every_id(str(tmp_path / name), 10), IDS)
