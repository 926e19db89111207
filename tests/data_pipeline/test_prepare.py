"""Text to shards: every kind of input, what counts, faults as sentences, crashes survived."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dying
import layout
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from rich.console import Console

from jaxpipe.config import ConfigError, DataConfig, SourceConfig
from jaxpipe.data import prepare as preparing
from jaxpipe.data.__main__ import main
from jaxpipe.data.manifest import JOURNAL, MANIFEST, Manifest
from jaxpipe.data.opening import open_documents
from jaxpipe.data.prepare import Options, prepare
from jaxpipe.data.sources import open_data
from jaxpipe.data.workers import WorkerDied, workers
from jaxpipe.model.loss import IGNORE

TEXTS = ["one", "zwei drei\n", "", "четыре", "five " * 40]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are written by this process: the same calls, sooner."""

    class Here:
        def __init__(self, count: int, work: Callable, jobs: Iterator[Any]):
            self.work, self.jobs = work, jobs

        def __enter__(self) -> Iterator[tuple[bool, Any]]:
            for job in self.jobs:
                reports: list[Any] = []
                result = self.work(job, reports.append)
                yield from ((False, report) for report in reports)
                yield True, result

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(preparing, "workers", Here)


def prepared(inputs: list[Path], folder: Path, **options: Any) -> Manifest:
    options = {"tokenizer": "bytes"} | options
    quiet = Console(quiet=True)
    return prepare(inputs, folder, Options(**options), processes=2, console=quiet)


def decoded(folder: Path) -> list[str]:
    """The documents of a folder, without the NUL at their end."""
    documents = open_documents(str(folder), 256)
    texts = [documents.tokens(i).astype("u1").tobytes() for i in range(len(documents.lengths))]
    assert all(text.endswith(b"\0") for text in texts)
    return [text[:-1].decode() for text in texts]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_texts(path: Path, texts: list[str], name: str) -> Path:
    """The texts in a file of the kind that the name says."""
    content = lines([{"text": text, "other": 1} for text in texts])
    match path.with_name(name).suffix:
        case ".parquet":
            table = pyarrow.table({"id": range(len(texts)), "text": texts})
            pyarrow.parquet.write_table(table, path.with_name(name), row_group_size=2)
            return path.with_name(name)
        case ".gz":
            content = gzip.compress(content)
        case ".zst":  # two frames, as parallel compressors write them
            half = len(content) // 2
            content = b"".join(map(zstandard.compress, (content[:half], content[half:])))
    path.with_name(name).write_bytes(content)
    return path.with_name(name)


NAMES = ["a.jsonl", "a.json.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.usefixtures("in_process")
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


@pytest.mark.usefixtures("in_process")
def test_a_text_file_is_a_document_and_a_folder_is_its_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").write_text("no")
    (tmp_path / "in" / "b" / "x.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "in" / "z.txt.gz").write_bytes(gzip.compress(b"last"))
    (tmp_path / "in" / "a.txt").write_text("first")
    prepared([tmp_path / "in"], tmp_path / "out")
    assert decoded(tmp_path / "out") == ["first", "x = 1\ny = 2\n", "last"]


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


@pytest.mark.usefixtures("in_process")
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
    config = DataConfig(source="file", path=out, heldout_path=out, shuffle=False)
    data = open_data(config, seq_len=8, vocab_size=256, seed=0, directory=tmp_path)
    stream = documents.stream(0, 73).astype(np.int32)
    batch = data.train.batch(0, microbatches=1, batch_size=9)
    counts = documents.counted_in_stream(0, 73)[1:]
    np.testing.assert_array_equal(batch["inputs"].ravel(), stream[:-1])
    np.testing.assert_array_equal(batch["targets"].ravel(), np.where(counts, stream[1:], IGNORE))
    assert 0 < counts.sum() < 72


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory with a tokenizer of few words."""
    folder = tmp_path_factory.mktemp("model")
    vocab = {"[UNK]": 0, "</s>": 1, "one": 2, "zwei": 3, "drei": 4, "five": 5, "[STOP]": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "</s> $A", special_tokens=[("</s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("eod", "of_config", "end"),
    [
        ("", None, [1]),
        ("", "[STOP]", [6]),
        ("", {"content": "[STOP]"}, [6]),
        ("[STOP]", None, [6]),
        ("4", None, [4]),
        ("none", "[STOP]", []),
    ],
)
def test_a_tokenizer_of_hugging_face(
    tmp_path: Path,
    tokenizer: Path,
    eod: str,
    of_config: Any,
    end: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(tokenizer, tmp_path / "model")
    if of_config:
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": of_config}))
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    manifest = prepared([path], tmp_path / "out", tokenizer=str(model), eod=eod)
    expected = [[2], [3, 4], [0], [5] * 40]
    assert layout.read(tmp_path / "out" / "000000.bin") == [[*ids, *end] for ids in expected]
    assert manifest.tokenizer.vocab_size == 7
    assert manifest.tokenizer.eod == (end[0] if end else None)
    kept = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert kept == (model / "tokenizer.json").read_bytes()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "zwei drei" in capsys.readouterr().out


FAULTS: dict[str, tuple[list[str | bytes], dict[str, Any], str]] = {
    "json": (
        ['{"text": "a"}', "", '{"text": '],
        {},
        r"in\.jsonl, line 3, is no document: .*trunca",
    ),
    "utf-8": ([b'{"text": "\xff"}'], {}, r"in\.jsonl, line 1, is no document: .*utf-8"),
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


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_sentences_and_write_nothing(tmp_path: Path, fault: str) -> None:
    content, options, sentence = FAULTS[fault]
    text = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in content)
    (tmp_path / "in.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        prepared([tmp_path / "in.jsonl"], tmp_path / "out", **options)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("piece", [1, 40, 10**6])
@pytest.mark.parametrize("name", NAMES)
def test_the_place_of_a_fault_is_that_in_its_file(tmp_path: Path, name: str, piece: int) -> None:
    path = write_texts(tmp_path / name, [*TEXTS, "7"], name)
    if name.endswith("parquet"):
        table = pyarrow.table({"text": [*TEXTS, None]})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        opened: Any = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
        with opened(path, "wb") as file:
            file.write(b"\n\n" + lines([{"text": text} for text in TEXTS]) + b"\n[]")
    with pytest.raises(ConfigError, match=rf"{name}, (row 6|line 9), is no document"):
        prepared([path], tmp_path / "out", piece_size=piece)


@pytest.mark.usefixtures("in_process")
def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n[]\n{}\n{"text": "b"}')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"b\.txt is no document: .*utf-8"):
        prepared([tmp_path / "b.txt"], tmp_path / "out")
    manifest = prepared(
        [tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", skip_bad_lines=True
    )
    assert (manifest.bad_lines, decoded(tmp_path / "out")) == (4, ["a", "b"])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_truncated_input_is_no_shorter_one(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, [str(np.arange(9999)) for _ in range(99)], name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=rf"{name} is .*truncated"):
        prepared([path], tmp_path / "out")


@pytest.mark.usefixtures("in_process")
def test_a_folder_belongs_to_its_inputs(tmp_path: Path) -> None:
    one, two = (write_texts(tmp_path / name, [name], name) for name in ("a.jsonl", "b.jsonl"))
    first = prepared([one], tmp_path / "out")
    assert prepared([one], tmp_path / "out") == first
    for inputs, options in (([two], {}), ([one, two], {}), ([one], {"eod": "1"})):
        with pytest.raises(ConfigError, match=r"out already holds what was prepared of others"):
            prepared(inputs, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=r"already holds files: remove it, or give another --out"):
        prepared([one], tmp_path)
    with pytest.raises(ConfigError, match=r"none\.txt does not exist: correct its path"):
        prepared([tmp_path / "none.txt"], tmp_path / "other")


@pytest.mark.usefixtures("in_process")
def test_pieces_that_are_done_stay_when_a_line_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (write_texts(tmp_path / name, TEXTS, name) for name in ("a.jsonl", "b.jsonl"))
    whole = bad.read_bytes()
    bad.write_bytes(whole + b"[]")
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 6, is no document"):
        prepared([good, bad], tmp_path / "out", piece_size=200)
    with pytest.raises(ConfigError, match=r"out is not prepared to its end"):
        open_documents(str(tmp_path / "out"), 256)
    bad.write_bytes(whole)
    written: list[int] = []
    write = preparing.write_piece
    monkeypatch.setattr(
        preparing,
        "write_piece",
        lambda piece, *a, **k: written.append(piece.number) or write(piece, *a, **k),
    )
    prepared([good, bad], tmp_path / "out", piece_size=200)
    assert written == [1, 2]  # not the first, which has nothing of b
    assert decoded(tmp_path / "out") == [text for text in TEXTS if text] * 2


@pytest.mark.usefixtures("in_process")
def test_one_process_prepares_a_folder(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    with (
        preparing._journal(tmp_path / "out", [], False),
        pytest.raises(ConfigError, match=r"out is being prepared by another process: wait"),
    ):
        prepared([path], tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(inputs: Path, out: Path) -> list[str]:
    words = ["prepare", str(inputs), "--tokenizer", "bytes", "--out", str(out), "--piece", "4kB"]
    return [sys.executable, "-m", "jaxpipe.data", *words, "--workers", "2"]


@pytest.mark.parametrize("kills", [3, 20])
def test_killed_again_and_again_it_gives_the_same(tmp_path: Path, kills: int) -> None:
    for i in range(60):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.txt").write_text(f"{i} text\n" * 5000)
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    subprocess.run(command(tmp_path / "in", tmp_path / "whole"), check=True, **quiet)
    out = tmp_path / "out"
    for kill in range(kills):
        process = subprocess.Popen(command(tmp_path / "in", out), **quiet)
        before = len([*out.glob("*.bin")])
        until = time.monotonic() + 30
        while time.monotonic() < until and len([*out.glob("*.bin")]) <= before + kill % 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.001 * (kill % 5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (out / MANIFEST).exists()
        for path in out.glob("*.bin"):  # what has its name is whole
            assert sum(map(len, layout.read(path))) * 2 == path.stat().st_size
    assert JOURNAL in contents(out)
    subprocess.run(command(tmp_path / "in", out), check=True, **quiet)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_worker_that_is_killed_is_noticed() -> None:
    with workers(2, dying.end_abruptly, iter([1, 2, 3])) as results:
        assert next(results) == (False, "begun")
        with pytest.raises(WorkerDied):
            list(results)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(lines([CHAT, {"prompt": "?" * 999, "completion": "!"}]))
    words = ["prepare", str(path), str(tmp_path / "b.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*words, "--tokenizer", "bytes", "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6 documents, 1,296 tokens in 1 shards" in said
    assert f"data.source=file data.path={tmp_path / 'out'}" in said
    assert main(["inspect", str(tmp_path / "out"), "--documents", "9"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words_of in ("document 4, 66 tokens", "zwei drei", "1,024 │ 1", "0..", "bytes, 256 ids"):
        assert words_of in said
    assert "!" not in said  # of a long document only the beginning is shown
    assert main(["inspect", str(tmp_path)]) == 2
    assert "has no manifest.json: give a folder that was prepared." in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("[]")
    words = ["prepare", str(tmp_path / "bad.jsonl"), "--tokenizer", "bytes"]
    assert main([*words, "--out", str(tmp_path / "none"), "--workers", "2"]) == 2
    assert "bad.jsonl, line 1, is no document: it is no JSON object" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("in_process")
def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl\.zst needs the package zstandard: pip install"
    ):
        prepared([path], tmp_path / "out")


@pytest.mark.usefixtures("in_process")
def test_a_manifest_vouches_and_must_fit(tmp_path: Path, tokenizer: Path) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    prepared([path], tmp_path / "bytes", piece_size=60)
    documents = open_documents(str(tmp_path / "bytes"), 256)
    assert all(shard.vouched for shard in documents.shards)
    with pytest.raises(ConfigError, match=r"000001\.bin has 209 at position \d+ and"):
        open_documents(str(tmp_path / "bytes"), 200)
    prepared([path], tmp_path / "words", tokenizer=str(tokenizer))
    with pytest.raises(
        ConfigError, match=r"bytes and .*words were prepared with different tokeniz"
    ):
        open_documents(str(tmp_path / "[bw]*s"), 256)
    paths = [str(tmp_path / name) for name in ("bytes", "words")]
    for config in (
        DataConfig(sources=tuple(SourceConfig(path=path) for path in paths)),
        DataConfig(source="file", path=paths[0], heldout_path=paths[1]),
    ):
        with pytest.raises(ConfigError, match=r"bytes and .*words were prepared with different"):
            open_data(config, seq_len=2, vocab_size=256, seed=0, directory=tmp_path)
    shard = tmp_path / "bytes" / "000001.idx"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        ConfigError, match=r"manifest\.json does not fit 000001\.bin: 000001\.idx has"
    ):
        open_documents(str(tmp_path / "bytes"), 256)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"000001\.idx cannot be read \(No such file"):
        open_documents(str(tmp_path / "bytes"), 256)
