"""The record that a run writes at every start: its configuration, versions and commit."""

import json
import platform
import subprocess

import jax
import msgspec
import pytest
from commands import SMALL

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.history import commit

QUIET = ["train.eval_every=0", "optimizer.warmup_steps=0", "parallel.pp=1"]


CONCRETE = "parallel.vocab_parallel_pp=false"  # what "auto" is on CPUs


@pytest.mark.slow
def test_every_start_is_kept_with_its_configuration(tmp_path):
    command = [str(SMALL), f"run.dir={tmp_path}", *QUIET]
    first, second = ["train.steps=1", "parallel.dp=-1"], ["train.steps=2", "parallel.dp=8"]
    assert train.main([*command, *first]) == 0
    assert load(tmp_path / "config.toml") == load(
        SMALL, [*command[1:], *first, "parallel.dp=8", CONCRETE]
    )
    assert train.main([*command, *second]) == 0
    resolved = load(SMALL, [*command[1:], *second, CONCRETE])
    assert load(tmp_path / "config.toml") == resolved
    starts = list(map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines()))
    assert [start["step"] for start in starts] == [0, 1]
    assert [start["config"]["train"]["steps"] for start in starts] == [1, 2]
    # in JSON's types: lists for tuples
    assert starts[1]["config"] == json.loads(msgspec.json.encode(resolved))
    for start in starts:
        assert start["python"] == platform.python_version()
        assert start["jax"] == jax.__version__
        assert (start["devices"], start["device"], start["processes"]) == (8, "cpu", 1)


def git(folder, *words):
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    ran = subprocess.run(
        ["git", *who, "-C", str(folder), *words], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    """Of a folder that git tracks; not of a checkout in which the folder is untracked."""
    assert commit(tmp_path) is None
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "module.py"
    module.write_text("one = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "--message", "first")
    assert commit(module.parent) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "second")
    git(tmp_path, "tag", "a-name")
    assert commit(module.parent) == git(tmp_path, "rev-parse", "HEAD")
    module.write_text("one = 2\n")
    assert commit(module.parent) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit(module.parent) is None
