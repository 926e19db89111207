"""Text to documents: every kind of input, loss masks, and a clear error for every fault."""

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from texts import CHAT, NAMES, TEXTS, decoded, lines, prepared, write_texts

from jaxpipe.config import ConfigError, DataConfig
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.data.sources import open_data
from jaxpipe.model.loss import IGNORE

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.mark.parametrize("piece", [1, 50, 10**6])
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_input_gives_its_documents(tmp_path: Path, name: str, piece: int) -> None:
    path = write_texts(tmp_path / name, TEXTS, name)
    manifest = prepared([path], tmp_path / "out", piece_size=piece)
    assert decoded(tmp_path / "out") == [text for text in TEXTS if text]
    assert (manifest.documents, manifest.empty, manifest.longest) == (4, 1, 201)
    assert manifest.tokens == manifest.counted == sum(len(t.encode()) + 1 for t in TEXTS if t)
    assert (manifest.smallest_id, manifest.largest_id) == (0, max("".join(TEXTS).encode()))
    assert [(b.documents, b.tokens) for b in manifest.histogram] == [
        (1, 4),
        (1, 11),
        (1, 13),
        (1, 201),
    ]
    whole = piece == 10**6 or name.endswith(("gz", "zst"))
    assert (len(manifest.shards) > 1) == (not whole)


def test_a_text_file_is_a_document_and_a_folder_is_its_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").write_text("no")
    (tmp_path / "in" / "b" / "x.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "in" / "z.txt.gz").write_bytes(gzip.compress(b"last"))
    (tmp_path / "in" / "a.txt").write_text("first")
    prepared([tmp_path / "in"], tmp_path / "out")
    assert decoded(tmp_path / "out") == ["first", "x = 1\ny = 2\n", "last"]
    for _ in range(2):  # the output is no input of the second run
        manifest = prepared([tmp_path / "in"], tmp_path / "in" / "b" / "out")
        assert manifest.documents == 3


def test_only_answers_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"prompt": "1+1=", "completion": "2"}, CHAT]))
    (tmp_path / "b.jsonl").write_bytes(lines([{"text": "all"}]))
    manifest = prepared(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", piece_size=9
    )
    documents = open_documents(str(tmp_path / "out"), 256)
    said = []
    for i in range(3):
        ids, counted = documents.tokens(i), documents.counted(i)
        said.append(ids[counted if counted is not None else slice(None)].astype("u1").tobytes())
    assert said == [b"2\0", b"yo<|im_end|>\n\0", b"all\0"]
    assert decoded(tmp_path / "out")[1] == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    )
    assert (manifest.counted, manifest.tokens) == (20, 6 + 66 + 4)
    assert len([*(tmp_path / "out").glob("*.bin")]) == 3
    assert len([*(tmp_path / "out").glob("*.mask")]) == 2

    out = str(tmp_path / "out")
    np.save(tmp_path / "heldout.npy", np.zeros(9, np.uint8))
    heldout = str(tmp_path / "heldout.npy")
    config = DataConfig(source="file", path=out, heldout_path=heldout, shuffle=False)
    data = open_data(config, seq_len=8, vocab_size=256, seed=0, directory=tmp_path)
    stream = documents.stream(0, 73).astype(np.int32)
    batch = data.train.batch(0, microbatches=1, batch_size=9)
    counts = documents.counted_in_stream(0, 73)[1:]
    np.testing.assert_array_equal(batch["inputs"].ravel(), stream[:-1])
    np.testing.assert_array_equal(batch["targets"].ravel(), np.where(counts, stream[1:], IGNORE))
    assert 0 < counts.sum() < 72


FAULTS: dict[str, tuple[list[str | bytes], dict[str, Any], str]] = {
    "json": (
        ['{"text": "a"}', "", '{"text": '],
        {},
        r"in\.jsonl, line 3, is no document: .*trunca",
    ),
    "utf-8": ([b'{"text": "\xff"}'], {}, r"in\.jsonl, line 1, is no document: .*(?i:utf-8)"),
    "field": (['{"text": "a"}', '{"body": "b"}'], {}, r"line 2, .* no field 'text', but 'body';"),
    "other field": (
        ['{"text": "a"}'],
        {"field": "body"},
        r"line 1, .* no field 'body', but 'text'",
    ),
    "completion": (['{"prompt": "a"}'], {}, r"line 1, .* no field 'completion', but 'prompt'"),
    "role": (['{"messages": [{"content": "a"}]}'], {}, r"line 1, .* no field 'role'"),
    "messages": (['{"messages": "a"}'], {}, r"its messages are no list of objects"),
    "number": (['{"text": 7}'], {}, r"its field 'text' is no string"),
    "list": (["[7]"], {}, r"it is no JSON object"),
    "empty": (['{"text": ""}'], {}, r"there is no text in the inputs of .*out: give others"),
    "tokenizer": (
        ['{"text": "a"}'],
        {"tokenizer": "none.json"},
        r"none\.json does not exist: give",
    ),
    "eod": (
        ['{"text": "a"}'],
        {"eod": "<end>"},
        r"bytes of 256 ids has no token <end>: give --eod",
    ),
    "large eod": (['{"text": "a"}'], {"eod": "256"}, r"bytes of 256 ids has no token 256"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_sentences_and_write_nothing(tmp_path: Path, fault: str) -> None:
    content, options, sentence = FAULTS[fault]
    text = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in content)
    (tmp_path / "in.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        prepared([tmp_path / "in.jsonl"], tmp_path / "runs" / "out", **options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("piece", [1, 40, 10**6])
@pytest.mark.parametrize("name", NAMES)
def test_the_place_of_a_fault_is_that_in_its_file(tmp_path: Path, name: str, piece: int) -> None:
    path = write_texts(tmp_path / name, [*TEXTS, "7"], name)
    if name.endswith("parquet"):
        table = pyarrow.table({"prompt": [*TEXTS, "7"], "completion": [*TEXTS, None]})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        opened: Any = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
        with opened(path, "wb") as file:
            file.write(b"\n\n" + lines([{"text": text} for text in TEXTS]) + b"\n[]")
    with pytest.raises(ConfigError, match=rf"{name}, (row 6|line 9), is no document"):
        prepared([path], tmp_path / "out", piece_size=piece)


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n[]\n{}\n{"text": "b"}')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"b\.txt is no document: .*utf-8"):
        prepared([tmp_path / "b.txt"], tmp_path / "out")
    manifest = prepared(
        [tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", skip_bad_lines=True
    )
    assert (manifest.bad_lines, decoded(tmp_path / "out")) == (4, ["a", "b"])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_truncated_input_is_no_shorter_one(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, [str(np.arange(9999)) for _ in range(99)], name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=rf"{name} is .*truncated"):
        prepared([path], tmp_path / "out")


def test_damaged_rows_are_a_sentence(tmp_path: Path) -> None:
    """In files with an intact footer: of text, and of ids as they are read."""
    table = pyarrow.table({"text": ["some text " * 99] * 9, "input_ids": [[*range(999)]] * 9})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    content = (tmp_path / "a.parquet").read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    (tmp_path / "a.parquet").write_bytes(bytes(len(content) - footer) + content[-footer:])
    with pytest.raises(
        ConfigError, match=r"a\.parquet is truncated or damaged \(.+\): fetch it again\.$"
    ):
        prepared([tmp_path / "a.parquet"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"row group 0 of .*a\.parquet cannot be read \(.+\):"):
        open_documents(str(tmp_path / "a.parquet"), 999).stream(0, 9)


def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl\.zst needs the package zstandard: pip install"
    ):
        prepared([path], tmp_path / "out")
