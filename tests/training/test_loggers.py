"""Weights & Biases, by a stand-in module and, where it is installed, by the real one."""

import json
import sys
import time

import pytest
from commands import SMALL, metrics

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.watch import loggers
from jaxpipe.run.watch.loggers import Observer, open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.runtime.storage.directory import WriteGuard

STAND_IN = '''
import json, pathlib, time

class Error(Exception):
    """What wandb raises."""

class UsageError(Error):
    """What wandb raises without a key."""

class CommError(Error):
    """What wandb raises without an answer."""

class Settings:
    def __init__(self, console):
        self.console = console

class Histogram:
    def __init__(self, values):
        self.values = values.tolist()

class Run:
    def __init__(self, path):
        self.path = path
    def write(self, value):
        with self.path.open("a") as file:
            file.write(json.dumps(value) + "\\n")
    def log(self, values, step):
        values = {k: v.values if isinstance(v, Histogram) else v for k, v in values.items()}
        self.write([step, values])
    def finish(self):
        self.write("finished")

def init(**given):
    if given["mode"] == "online":
        raise UsageError("No API key configured.\\nMore of it.")
    if given["project"] == "silent":
        raise CommError("Run initialization has timed out after 90.0 sec.")
    if given["project"] == "broken":
        raise TypeError("a protocol buffer of another version")
    if given["project"] == "exits":
        raise SystemExit(1)
    if given["project"] == "hangs":
        time.sleep(600)
    given["settings"] = given["settings"].console
    path = pathlib.Path(given["dir"]) / "stand_in.jsonl"
    path.write_text(json.dumps(given) + "\\n")
    return Run(path)
'''
RUN = ["train.steps=2", "train.eval_every=0", "parallel.pp=1", "parallel.dp=8"]


def without_wandb(monkeypatch):
    """Remove wandb from the imported modules."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    without_wandb(monkeypatch)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("wandb", None)


def stood_in(directory):
    """Return the stand-in's calls: its arguments, the lines of the log, its end."""
    return map(json.loads, (directory / "stand_in.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_run_is_logged_at_wandb_too(tmp_path, stand_in):
    directory = tmp_path / "small"
    command = [str(SMALL), f"run.dir={directory}", "log.wandb=offline", "log.wandb_project=mine"]
    assert train.main([*command, *RUN]) == 0
    given, *logged, finished = stood_in(directory)
    assert (given["project"], given["group"], given["mode"]) == ("mine", "small", "offline")
    assert given["name"] == "small from step 0"
    assert given["config"]["train"]["seq_len"] == 32
    assert given["settings"] == "off"
    assert finished == "finished"
    own = metrics(directory)
    assert [step for step, _ in logged] == [1, 2]
    assert all({"step": step} | values == own[step] for step, values in logged)


def test_many_numbers_are_a_histogram(tmp_path, stand_in):
    config = load(SMALL, [f"run.dir={tmp_path}", "log.wandb=offline"])
    with MetricsLog(tmp_path, last_step=4, loggers=open_loggers(config, 4)) as log:
        log.write(5, {"counts": [[1, 2]], "many": list(range(100))})
    given, logged, _ = stood_in(tmp_path)
    assert given["name"].endswith("from step 4")
    assert logged == [5, {"counts/0/0": 1, "counts/0/1": 2, "many": list(range(100))}]


def test_the_mode_of_the_environment_goes_first(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = load(SMALL, [f"run.dir={tmp_path}", "log.wandb=online"])
    with MetricsLog(tmp_path, last_step=0, loggers=open_loggers(config, 0)):
        pass
    given, _ = stood_in(tmp_path)
    assert given["mode"] == "offline"


def test_what_wandb_refuses_is_one_sentence(tmp_path, stand_in, capsys):
    assert train.main([str(SMALL), f"run.dir={tmp_path}/run", "log.wandb=online", *RUN]) == 2
    said = capsys.readouterr().err
    assert "log.wandb='online' is refused by wandb (No API key configured.): run" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("project", "last_step", "reason"),
    [
        ("silent", 0, "CommError: Run initialization has timed out after 90.0 sec."),
        ("silent", 4, "CommError: Run"),
        ("broken", 0, "TypeError: a protocol buffer"),
        ("exits", 0, "SystemExit: 1"),
        ("hangs", 0, "no answer within 0 s"),
        ("mine", 4, "UsageError: No API key configured."),
    ],
)
def test_a_logger_that_cannot_start_is_one_warning(
    tmp_path, stand_in, monkeypatch, project, last_step, reason
):
    """Without a key only a new run is refused: a run that starts again has steps to lose."""
    monkeypatch.setattr(loggers, "_LONG_SECONDS", 0.4 if project == "hangs" else 60.0)
    said, mode = [], "online" if project == "mine" else "offline"
    how = [f"run.dir={tmp_path}", f"log.wandb={mode}", f"log.wandb_project={project}"]
    assert open_loggers(load(SMALL, how), last_step, WriteGuard(said.append)) == []
    (sentence,) = said
    assert f"{tmp_path}/wandb cannot be written ({reason}" in sentence
    assert "training goes on; this start logs nothing there" in sentence


def test_a_logger_that_fails_or_hangs_later_is_one_warning(tmp_path, monkeypatch):
    class Failing:
        name = "failing"

        def show(self, step, values):
            raise RuntimeError("no more")

        def close(self):
            raise KeyError("closed")

    class Hanging(Failing):
        def show(self, step, values):
            time.sleep(600)

    monkeypatch.setattr(loggers, "_SHORT_SECONDS", 0.2)
    said = []
    observers = [Observer("failing", Failing), Observer("hanging", Hanging)]
    guard = WriteGuard(said.append)
    with MetricsLog(tmp_path, last_step=0, loggers=observers, guard=guard) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 1.0})
    assert [line.partition(":")[2].partition(":")[0].strip() for line in said] == [
        "failing cannot be written (RuntimeError",
        "hanging cannot be written (no answer within 0 s)",
    ]
    assert len(metrics(tmp_path)) == 3


def test_a_rollback_begins_another_run_at_wandb(tmp_path, stand_in):
    config = load(SMALL, [f"run.dir={tmp_path}", "log.wandb=offline"])
    with MetricsLog(tmp_path, last_step=0, loggers=open_loggers(config, 0)) as log:
        log.write(5, {"loss": 1})
        log.rewind(4)
        log.write(5, {"loss": 2})
    given, logged, _ = stood_in(tmp_path)
    assert given["name"].endswith("from step 4")
    assert logged == [5, {"loss": 2}]


@pytest.mark.parametrize("folder", [False, True])
def test_without_the_package_the_configuration_is_refused(tmp_path, monkeypatch, capsys, folder):
    """Also if there is a folder named wandb, which wandb itself creates."""
    without_wandb(monkeypatch)
    if folder:
        (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert train.main([str(SMALL), f"run.dir={tmp_path}/run", "log.wandb=offline"]) == 2
    assert "log.wandb='offline' needs the package wandb, which is not" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_wandb_itself(tmp_path):
    wandb = pytest.importorskip("wandb")
    config = load(SMALL, [f"run.dir={tmp_path}", "log.wandb=offline"])
    with MetricsLog(tmp_path, last_step=0, loggers=open_loggers(config, 0)) as log:
        log.write(1, {"loss": 0.5, "many": list(range(100))})
    wandb.teardown()  # otherwise its process may still be writing
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"loss" in content
    assert b"0.5" in content
    assert b"histogram" in content
