"""Two runs side by side: where they part, what differs in their settings, and the picture."""

import json

import pytest
from commands import SMALL

from jaxpipe import compare, train
from jaxpipe.compare import parting


def write(directory, losses, settings="[train]\nseed = 0\n[run]\ndir = 'x'\n"):
    """A run that has logged so much; the last line is one that it is still writing."""
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (directory / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "lo']))
    if settings:
        (directory / "config.toml").write_text(settings)
    return str(directory)


def test_two_real_runs(tmp_path, capsys):
    """Of the same data and another schedule: rounding apart; of another rate: far apart."""
    command = [str(SMALL), "train.steps=3", "train.eval_every=0", "parallel.pp=2"]
    others = ["parallel.schedule=gpipe"], ["parallel.schedule=gpipe", "optimizer.lr=0.02"]
    runs = [str(tmp_path / name) for name in ("one", "other", "third")]
    for run, more in zip(runs, ([], *others)):
        assert train.main([*command, f"run.dir={run}", "parallel.dp=4", *more]) == 0
    picture = tmp_path / "compare.svg"
    capsys.readouterr()
    assert compare.main([*runs[:2], "--picture", str(picture), "--tolerance", "1e-5"]) == 0
    said = capsys.readouterr().out
    assert "parallel.schedule" in said
    assert "run.dir" not in said
    assert "<svg" in picture.read_text()
    assert compare.main([runs[0], runs[2], "--picture", str(tmp_path / "c.png")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "first by more than 1e-06 │ 2" in said
    assert "optimizer.lr" in said
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_where_runs_part():
    nan = float("nan")
    one, other = {1: 4.0, 2: 2.0, 3: nan, 5: 1.0}, {1: 4.0, 2: 2.0 + 1e-9, 3: nan, 4: 1.0, 5: nan}
    found = parting(one, other, 1e-6)
    assert (found.steps, found.first, found.beyond) == (4, 2, 5)
    assert (found.largest, found.largest_at) == (float("inf"), 5)
    same = parting(one, one, 0.0)
    assert (same.first, same.beyond, same.largest) == (None, None, 0.0)


def test_equal_runs_and_runs_without_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = write(tmp_path / "one", [3, None, 1]), write(tmp_path / "other", [3, None], "")
    assert compare.main([one, one]) == 0
    said = capsys.readouterr().out
    assert "settings are the same" in said
    assert said.count("none") == 3
    assert (tmp_path / "compare.svg").exists()
    assert compare.main([one, other]) == 0
    assert "has no config.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "more", "sentence"),
    [
        ({}, [], "other/metrics.jsonl (No such file"),
        ({"losses": [1]}, ["--metric", "mfu"], "has no number 'mfu' of a step: give another"),
        ({"losses": [[1]]}, [], "has no number 'loss' of a step"),
        ({"losses": []}, [], "there are none."),
        ({"losses": [1], "settings": "[train\n"}, [], "other/config.toml ("),
        ({"losses": [1]}, ["--picture", "no/where.svg"], "--picture no/where.svg cannot be"),
        ({"losses": [1]}, ["--picture", "loss.doc"], "--picture loss.doc cannot be"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, make, more, sentence):
    if make:
        write(tmp_path / "other", **make)
    one = write(tmp_path / "one", [3, 2])
    assert compare.main([one, str(tmp_path / "other"), *more]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_runs_without_a_common_step(tmp_path, capsys):
    one, other = write(tmp_path / "one", [3, 2]), write(tmp_path / "other", [1])
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    assert compare.main([one, other]) == 2
    assert "no step in common" in capsys.readouterr().err
