"""Folders of shards: their content, their owner, and recovery from any crash."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dying
import layout
import pytest
from texts import CHAT, TEXTS, decoded, lines, prepared, write_texts

from jaxpipe.config import ConfigError, DataConfig, SourceConfig
from jaxpipe.data.__main__ import main
from jaxpipe.data.prepare import preparation as preparing
from jaxpipe.data.prepare.journal import lock_folder
from jaxpipe.data.prepare.workers import WorkerDiedError, run_workers
from jaxpipe.data.shards.manifest import JOURNAL, MANIFEST
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.data.sources import open_data


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
    assert layout.read(tmp_path / "out" / "000000.bin") == [[1, *ids, *end] for ids in expected]
    assert manifest.tokenizer.vocab_size == 7
    assert manifest.tokenizer.eod == (end[0] if end else None)
    kept = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert kept == (model / "tokenizer.json").read_bytes()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "zwei drei" in capsys.readouterr().out


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("bos", "start"), [("", [1]), ("none", []), ("[STOP]", [6]), ("3", [3])])
def test_what_starts_a_document(
    tmp_path: Path, tokenizer: Path, bos: str, start: list[int]
) -> None:
    """By default as the tokenizer itself does; not twice, and not learned after a prompt."""
    records = [{"text": "one"}, {"text": "</s> one"}, {"prompt": "one ", "completion": "five"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(records))
    manifest = prepared([path], tmp_path / "out", tokenizer=str(tokenizer), bos=bos, eod="none")
    assert manifest.tokenizer.bos == tuple(start)
    second = start[start == [1] :]
    assert layout.read(tmp_path / "out" / "000000.bin") == [
        [*start, 2], [*second, 1, 2], [*start, 2, 5],
    ]  # fmt: skip
    assert manifest.counted == len(start) + len(second) + 1 + 2 + 1
    with pytest.raises(ConfigError, match="has no token <s>: give --bos one of its tokens or ids"):
        prepared([path], tmp_path / "other", tokenizer=str(tokenizer), bos="<s>")


@pytest.mark.usefixtures("in_process")
def test_a_folder_belongs_to_its_inputs(tmp_path: Path) -> None:
    one, two = (write_texts(tmp_path / name, [name], name) for name in ("a.jsonl", "b.jsonl"))
    first = prepared([one], tmp_path / "out")
    assert prepared([one], tmp_path / "out") == first
    for inputs, options in (([two], {}), ([one, two], {}), ([one], {"eod": "1"})):
        with pytest.raises(ConfigError, match=r"out already holds what was prepared of others"):
            prepared(inputs, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=r"already holds other files: give another --out"):
        prepared([one], tmp_path)
    with pytest.raises(ConfigError, match=r"none\.txt does not exist: correct its path"):
        prepared([tmp_path / "none.txt"], tmp_path / "other")


@pytest.mark.usefixtures("in_process")
def test_files_of_others_stay(tmp_path: Path) -> None:
    path, mine = tmp_path / "a.jsonl", tmp_path / "out" / "mine.tmp"
    write_texts(path, TEXTS, "a.jsonl")
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"already holds other files: give another --out"):
        prepared([path], tmp_path / "out")
    (tmp_path / "out" / "unfinished.jsonl").write_text("")  # of a run that was killed
    path.write_bytes(b"[]")
    with pytest.raises(ConfigError, match=r"line 1, is no document"):
        prepared([path], tmp_path / "out")
    assert [*mine.parent.iterdir()] == [mine]


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
        lock_folder(tmp_path / "out"),
        pytest.raises(ConfigError, match=r"out is being prepared by another process: wait"),
    ):
        prepared([path], tmp_path / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(inputs: Path, out: Path) -> list[str]:
    words = ["prepare", str(inputs), "--tokenizer", "bytes", "--out", str(out), "--piece", "4kB"]
    return [sys.executable, "-m", "jaxpipe.data", *words, "--workers", "2"]


@pytest.mark.slow
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
        for path in out.glob("*.bin"):  # a file with its final name is complete
            assert sum(map(len, layout.read(path))) * 2 == path.stat().st_size
    assert JOURNAL in contents(out)
    subprocess.run(command(tmp_path / "in", out), check=True, **quiet)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_worker_that_is_killed_is_noticed() -> None:
    with run_workers(2, dying.end_abruptly, iter([1, 2, 3])) as results:
        assert next(results) == (False, "started")
        with pytest.raises(WorkerDiedError):
            list(results)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(lines([CHAT, {"prompt": "?" * 999, "completion": "!"}]))
    words = ["prepare", str(path), str(tmp_path / "b.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*words, "--tokenizer", "bytes", "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "6 documents, 1,296 tokens in 1 shards" in said
    assert f"data.source=file data.path={tmp_path / 'out'}, and model.vocab_size=256 or" in said
    assert main(["inspect", str(tmp_path / "out"), "--documents", "9"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words_of in ("document 4, 66 tokens", "zwei drei", "1,024 │ 1", "0..", "bytes, 256 ids"):
        assert words_of in said
    assert "!" not in said  # only the beginning of a long document is shown
    assert main(["inspect", str(tmp_path)]) == 2
    assert (
        "has no manifest.json: give a folder that `python -m jaxpipe.data prepare` wrote."
        in capsys.readouterr().err
    )
    (tmp_path / "bad.jsonl").write_text("[]")
    words = ["prepare", str(tmp_path / "bad.jsonl"), "--tokenizer", "bytes"]
    assert main([*words, "--out", str(tmp_path / "none"), "--workers", "2"]) == 2
    assert "bad.jsonl, line 1, is no document: it is no JSON object" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    words = ["prepare", str(path), "--tokenizer", "bytes", "--out", str(path)]
    assert main(words) == 2
    assert "a.jsonl cannot be written (File exists): see that " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--workers", "0"])
    assert "--workers: 0 is no number of 1 or more" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
@pytest.mark.usefixtures("in_process")
def test_inspect_marks_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text, for a log or a pipe has no colours."""
    records = [{"text": "one"}, {"prompt": "1 + 1 = ", "completion": "zwei"}, CHAT]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    prepared([tmp_path / "a.jsonl"], tmp_path / "out", eod="none")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "document 0, 3 tokens, all count in the loss\none\n" in said
    assert (
        "document 1, 12 tokens, 4 count in the loss, those between ⟦ and ⟧\n1 + 1 = ⟦zwei⟧" in said
    )
    assert "<|im_start|>assistant\n⟦yo<|im_end|>\n⟧" in said


def test_what_a_crash_leaves_is_no_hindrance(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    whole = prepared([path], tmp_path / "whole", piece_size=60)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{JOURNAL}.{'7' * 32}.tmp").touch()  # before its first line
    prepared([path], tmp_path / "out", piece_size=60)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (tmp_path / "out" / JOURNAL).touch()  # the manifest was written last
    assert prepared([path], tmp_path / "out", piece_size=60) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (tmp_path / "out" / MANIFEST).rename(tmp_path / "out" / f"{MANIFEST}.{'7' * 32}.tmp")
    (tmp_path / "out" / JOURNAL).write_text('{"piece":')  # half a line
    prepared([path], tmp_path / "out", piece_size=60)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("in_process")
def test_a_pattern_means_a_prepared_folder_once(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a", TEXTS, "a.jsonl")
    prepared([path], tmp_path / "x" / "out")
    layout.write(tmp_path / "x" / "b.bin", [[[7]]], "uint16")
    documents = open_documents(str(tmp_path / "x" / "**"), 256)
    assert documents.lengths.tolist() == [4, 11, 13, 201, 1]
    (tmp_path / "x" / "out" / MANIFEST).rename(tmp_path / "x" / "out" / JOURNAL)
    with pytest.raises(ConfigError, match=r"out is not prepared to its end"):
        open_documents(str(tmp_path / "x" / "*"), 256)


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
