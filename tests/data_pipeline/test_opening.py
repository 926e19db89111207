"""Shards of other tools: read document by document, split, refused where they do not fit."""

import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import layout
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.shards import token_files
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.token_files import open_documents

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10, 11]], [[12]]]  # one with two sequences
IDS = list(range(1, 13))


def plain(documents: ShardedDocuments) -> list[list[int]]:
    return [documents.tokens(i).tolist() for i in range(len(documents.lengths))]


def flat(documents: list[list[list[int]]]) -> list[list[int]]:
    return [[*chain(*document)] for document in documents]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_megatrons_shards_are_read(tmp_path: Path, dtype: str, modes: bool) -> None:
    path = layout.write(tmp_path / "a.bin", DOCUMENTS, dtype, modes)
    for name in (path, path.with_suffix(""), tmp_path, tmp_path / "*"):
        documents = open_documents(str(name), 13)
        assert plain(documents) == flat(DOCUMENTS)
        assert documents.lengths.tolist() == [3, 3, 5, 1]
        assert documents.stream(2, 8).tolist() == IDS[2:8]
        assert documents.tokens(2, 1, 3).tolist() == [8, 9]
        assert documents.counted(2) is None


def test_an_index_without_documents_has_one_for_every_sequence(tmp_path: Path) -> None:
    path = layout.write(tmp_path / "a.bin", [], "uint16")
    sequences = layout.write(tmp_path / "b.bin", [[s] for d in DOCUMENTS for s in d], "uint16")
    index = sequences.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(index[:26] + (1).to_bytes(8, "little") + index[34:-40])
    path.write_bytes(sequences.read_bytes())
    assert plain(open_documents(str(path), 13)) == [[1, 2, 3], [4], [5, 6], IDS[6:11], [12]]


def write_parquet(path: Path, lists: list[list[int] | None], **options: object) -> Path:
    ids = pyarrow.array(lists, pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table({"id": range(len(lists)), "input_ids": ids})
    pyarrow.parquet.write_table(table, path, row_group_size=2, **options)
    return path


def test_parquet_is_read_by_its_lists(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [[1, 2, 3], [], None, [4, 5, 6], *flat(DOCUMENTS)[2:]])
    documents = open_documents(str(tmp_path / "a.parquet"), 13)
    assert len(documents) == 12
    assert plain(documents) == flat(DOCUMENTS)
    assert documents.stream(0, 12).tolist() == IDS
    train, heldout = documents.split(0.4)
    assert (plain(train), plain(heldout)) == (flat(DOCUMENTS)[:2], flat(DOCUMENTS)[2:])


def test_parquet_of_a_flattened_struct_is_read(tmp_path: Path) -> None:
    ids = pyarrow.array(flat(DOCUMENTS), pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table({"data.ids": ids, "data.id": range(len(ids))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert plain(open_documents(str(tmp_path / "a.parquet"), 13)) == flat(DOCUMENTS)


def test_parquet_without_statistics_must_have_full_lists(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [[1, 2], [3]], write_statistics=False)
    assert plain(open_documents(str(tmp_path), 13)) == [[1, 2], [3]]
    write_parquet(tmp_path / "a.parquet", [[1, 2], []], write_statistics=False)
    with pytest.raises(ConfigError, match=r"row group 0 of .*a\.parquet has lists that are empty"):
        open_documents(str(tmp_path), 13).stream(0, 1)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Write one shard of every kind, with DOCUMENTS in them twice."""
    layout.write(tmp_path / "a.bin", DOCUMENTS[:2], "int32")
    np.save(tmp_path / "b.npy", np.arange(7, 13))
    layout.write(tmp_path / "c.bin", [], "uint16")
    write_parquet(tmp_path / "d.parquet", flat(DOCUMENTS))
    return tmp_path


def test_shards_are_one_stream(several: Path) -> None:
    documents = open_documents(str(several), 13)
    assert plain(documents) == [*flat(DOCUMENTS)[:2], IDS[6:], *flat(DOCUMENTS)]
    twice = [*IDS, *IDS]
    for begin in range(24):
        for end in range(begin + 1, 25):
            assert documents.stream(begin, end).tolist() == twice[begin:end]


@pytest.mark.parametrize("tokens", range(1, 24))
def test_a_document_is_in_one_split_alone(several: Path, tokens: int) -> None:
    documents = open_documents(str(several), 13)
    train, heldout = documents.split(tokens / 24)
    assert len(heldout) >= tokens
    assert plain(train)[:-1] == plain(documents)[: len(plain(train)) - 1]
    bare = 6 < len(train) < 12  # a file without documents is split anywhere, as is the first
    if bare or len(train) < 3:
        assert len(heldout) == tokens
    else:
        assert plain(train) + plain(heldout) == plain(documents)
    both = [*train.stream(0, len(train)), *heldout.stream(0, len(heldout))]
    assert both == documents.stream(0, 24).tolist()
    assert train.fingerprint != heldout.fingerprint


def test_ids_outside_are_found_as_they_are_read(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "FULL_DIGEST_BYTES", 0)
    documents = open_documents(str(several), 11)
    assert documents.stream(0, 10).tolist() == IDS[:10]
    with pytest.raises(ConfigError, match=r"b\.npy has 12 at position 5 and model\.vocab_size is"):
        documents.stream(0, 13)
    with pytest.raises(ConfigError, match=r"d\.parquet has 11 at position 10 and"):
        documents.tokens(5)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def put(path: Path, at: int, content: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + content + old[at + len(content) :])


MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "short bin": (
        lambda p: cut(p, -2),
        r"a\.idx does not fit a\.bin: its sequences end at byte 24",
    ),
    "half an id": (lambda p: cut(p, -1), r"a\.bin has 23 bytes, not 22"),
    "short idx": (lambda p: cut(p.with_suffix(".idx"), -1), r"a\.idx has \d+ bytes, not 134"),
    "header": (lambda p: cut(p.with_suffix(".idx"), 30), r"no index of version 1 .* truncated"),
    "magic": (lambda p: put(p.with_suffix(".idx"), 0, b"TNT"), r"no index of version 1"),
    "version": (lambda p: put(p.with_suffix(".idx"), 9, b"\4"), r"no index of version 1"),
    "floats": (
        lambda p: put(p.with_suffix(".idx"), 17, b"\6"),
        r"ids of type 6, which is no integ",
    ),
    "wider": (lambda p: put(p.with_suffix(".idx"), 17, b"\4"), r"end at byte"),
    "documents": (lambda p: put(p.with_suffix(".idx"), -8, b"\4"), r"end with its 5 sequences"),
    "mask": (lambda p: p.with_suffix(".mask").write_bytes(b"\0"), r"a\.mask has 1 bytes, not 2"),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, fault: str) -> None:
    path = layout.write(tmp_path / "a.bin", DOCUMENTS, "uint16")
    change, sentence = MISFITS[fault]
    change(path)
    with pytest.raises(ConfigError, match=sentence):
        open_documents(str(path), 13)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda d: None, r"ends in \.bin, \.npy, .* or \.parquet, unlike .* and all that is in it"),
        (lambda d: (d / "a.bin").touch(), r"a\.bin is empty"),
        (lambda d: layout.write(d / "a.bin", [[[1]]], "uint16").unlink(), r"a\.idx has no a\.bin"),
        (lambda d: layout.write(d / "a.bin", [[[]]], "uint16"), r"holds no tokens: write it again"),
        (lambda d: write_parquet(d / "a.parquet", [[], None]), r"holds no tokens: write it again"),
        (lambda d: (d / "a.parquet").write_bytes(b"PAR1"), r"a\.parquet is no Parquet file"),
        (
            lambda d: pyarrow.parquet.write_table(
                pyarrow.table({"a": [[1]], "b": [[2]]}), d / "a.parquet"
            ),
            r"has 2 columns of lists of integers, and none named input_ids or tokens",
        ),
        (lambda d: (d / "unfinished.jsonl").touch(), r"not prepared to its end: give the command"),
        (lambda d: (d / "manifest.json").write_text("{}"), r"manifest\.json is damaged or of"),
    ],
)
def test_faults_of_folders_are_sentences(
    tmp_path: Path, make: Callable[[Path], object], sentence: str
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as caught:
        open_documents(str(tmp_path), 13)
    assert "\n" not in str(caught.value)


def test_opening_takes_no_time_in_tokens(tmp_path: Path) -> None:
    """Four terabytes in sparse files."""
    documents, each = 10_000, 200_000_000
    layout.write(tmp_path / "a.bin", [[[1]]] * documents, "uint16")
    with (tmp_path / "a.idx").open("r+b") as index:
        index.seek(34)
        index.write(np.full(documents, each, "<i4").tobytes())
        index.write((np.arange(documents, dtype="<i8") * each * 2).tobytes())
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(documents * each * 2)
    start = time.perf_counter()
    opened = open_documents(str(tmp_path), 13)
    train, heldout = opened.split(0.05)
    assert (len(train), len(heldout)) == (9_500 * each, 500 * each)
    assert not heldout.stream(10**10, 10**10 + 8193).any()
    assert time.perf_counter() - start < 2
