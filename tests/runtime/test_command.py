"""Errors of commands become exit codes in one place, which the launch scripts agree with."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL

from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.runtime import command, processes
from jaxpipe.runtime.exit_code import ExitCode

ROOT = Path(__file__).parents[2]


class NoGoodError(Exception):
    pass


def refused_by_storage():
    error = ConfigError("the data cannot be read")
    error.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), ExitCode.BAD_INPUT),
        (ScheduleError("no"), ExitCode.BAD_INPUT),
        (refused_by_storage(), ExitCode.NO_ANSWER),
        (OSError(errno.EIO, "Input/output error"), ExitCode.NO_ANSWER),
        (OSError(errno.EACCES, "Permission denied"), ExitCode.CRASH),
        (processes.NotMetError("no"), ExitCode.OTHERS_GONE),
        (NoGoodError("no"), ExitCode.FAILED),
        (ZeroDivisionError("no"), ExitCode.CRASH),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_code_of_an_error(error, code, capsys):
    def fail():
        raise error

    assert command.run(fail, (NoGoodError,)) == code
    printed = capsys.readouterr().err
    assert ("Traceback" in printed) == (code == ExitCode.CRASH)
    assert printed.strip()


def test_a_crash_of_a_run_is_not_a_loss_that_is_not_finite(monkeypatch, tmp_path, capsys):
    def crash(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train, "train", crash)
    assert train.main([str(SMALL), f"run.dir={tmp_path}"]) == 70
    assert "error: RuntimeError: a bug" in capsys.readouterr().err


def test_slurm_requeues_after_what_may_pass():
    script = (ROOT / "launch/slurm.sbatch").read_text()
    assert "final=$(.venv/bin/python -m jaxpipe.runtime.exit_code) || exit" in script
    final = subprocess.check_output(
        [sys.executable, "-m", "jaxpipe.runtime.exit_code"], cwd=ROOT, text=True
    ).strip()
    assert final == "1|2|4|6"
    again = [code for code in ExitCode if code not in (ExitCode.DONE, ExitCode.INTERRUPTED)]
    for code in again:
        found = subprocess.run(
            ["grep", "-qxE", final], input=f"{int(code)}\n", text=True, check=False
        )
        assert (found.returncode != 0) == code.may_pass, code


def test_the_page_of_troubles_has_every_code():
    page = (ROOT / "jaxpipe/runtime/TROUBLES.md").read_text()
    listed = set(
        map(int, re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", page, re.M))))
    )
    assert {code for code in ExitCode if code} <= listed


COMMANDS = ["train", "plan", "data", "checkpoint", "generate", "score", "evaluate", "verify",
            "profile", "bench"]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["plan", "--rules"], ["train", str(SMALL), "--print-config"],
     pytest.param(["plan", str(SMALL)], marks=pytest.mark.extended),
     *(pytest.param([name, "--help"], marks=pytest.mark.extended) for name in COMMANDS)],
    ids=" ".join,
)  # fmt: skip
def test_a_reader_that_leaves_ends_the_command_quietly(words):
    """As `head` does, which closes the pipe before the command has written all."""
    with subprocess.Popen(
        [sys.executable, "-m", f"jaxpipe.{words[0]}", *words[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as started:  # fmt: skip
        started.stdout.close()
        assert started.stderr.read() == ""
    ends = [0, 128 + 13]  # 0: what is written last is dropped
    assert started.returncode in (ends if "--help" in words or "--rules" in words else ends[1:])


def test_a_pipe_that_is_not_the_output_is_an_error(capsys):
    def fail():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert command.run(fail) not in (0, 128 + 13)
    assert "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "plan", "data", "checkpoint"])
def test_a_python_without_the_packages_is_one_sentence(name):
    made = subprocess.run(
        [sys.executable, "-S", "-m", f"jaxpipe.{name}", "CONFIG"],
        capture_output=True, text=True, cwd=ROOT, env={"PATH": ""}, check=False,
    )  # fmt: skip
    assert made.returncode == 1
    assert made.stderr.startswith("error: this Python lacks the packages of jaxpipe")
    assert made.stderr.count("\n") == 1


UNIGNORED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path):
    slow = "import time; print('importing', flush=True); time.sleep(60)"
    (tmp_path / "msgspec.py").write_text(slow)
    with subprocess.Popen(
        [sys.executable, "-c", UNIGNORED, sys.executable, "-m", "jaxpipe.plan", "--help"],
        env=os.environ | {"PYTHONPATH": tmp_path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as started:  # fmt: skip
        assert started.stdout.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        assert started.stderr.read() == ""
    assert started.returncode == -signal.SIGINT


def test_ctrl_c_during_the_work_has_a_sentence(capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # as after the imports of a command
    try:
        assert command.run(lambda: signal.raise_signal(signal.SIGINT)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
