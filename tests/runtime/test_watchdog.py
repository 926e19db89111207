"""A run that hangs ends by itself, names the process that is stuck, and goes on when started again.

`stuck.py` is the training command in which one process gets stuck at a given place.
"""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import losses, start, train_command
from several import busy, ends, start_all

TIMEOUT = 6  # seconds; a step takes less than one, on a busy machine two
ALLOWED = 10  # seconds after the timeout until all that can have exited
CODE = 5
SCRIPT = str(Path(__file__).with_name("stuck.py"))
SMALL_RUN = ["train.eval_every=0", "log.tensorboard=false", "train.steps=12"]
TWO = ["parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=2"]  # devices, one per process
# A process that is stopped or keeps Python's lock can write nothing and cannot exit.
DEAF = ("is_stopped", "keeps_gil")


def command(directory, count, *more):
    """Return the command of a run by two processes of one device, or four of two."""
    mesh = TWO if count == 2 else []
    return train_command(directory, *SMALL_RUN, *mesh, *more, devices=1 if count == 2 else 2)


def stuck_run(directory, count, stuck, place, way):
    """Run until all processes that can have exited; return codes, outputs and seconds of the hang.

    The hang starts when the stuck process notes the time in a file.
    """
    prints = ["debug.print_messages=true"] if place == "in_callback" else []
    line = command(directory, count, f"runtime.hang_timeout={TIMEOUT}", *prints)
    at = line.index("-m")
    line[at : at + 2] = [SCRIPT, str(stuck), place, way]
    note = directory.parent / "stuck-since"
    group = start_all(count, line, {"STUCK_SINCE": str(note)})
    able = [process for index, process in enumerate(group) if index != stuck or way not in DEAF]
    deadline = time.monotonic() + 200
    while any(process.poll() is None for process in able) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = time.time()
    for process in group:
        process.kill()
    since = float(note.read_text()) if note.exists() else -float("inf")
    return ends(group), ended - since


def check(directory, count, stuck, place, way, phase):
    """All that can exit with the code, one sentence that names process and phase, and stacks."""
    found, seconds = stuck_run(directory, count, stuck, place, way)
    able = [index for index in range(count) if index != stuck or way not in DEAF]
    for index in able:
        code, output = found[index]
        assert code == CODE, output
        (sentence,) = re.findall("^error: .*$", output, re.MULTILINE)
        assert re.findall(r"process (\d+)", sentence) == [str(stuck)], sentence
        assert phase in sentence
    written = able if way == "is_stopped" else range(count)
    for index in written:
        (file,) = directory.glob(f"hangs/*/process-{index}.txt")
        assert "stuck.py" in file.read_text()
    assert seconds < LIMITS.get(place, TIMEOUT) + ALLOWED


LIMITS = {"in_start": 40}  # set by `stuck.py`


@pytest.mark.extended
@pytest.mark.slow(only=["0-in_data-is_stopped-loading a batch"])
@pytest.mark.parametrize(
    ("stuck", "place", "way", "phase"),
    [(1, "in_data", "sleeps", "loading a batch"), (0, "in_data", "is_stopped", "loading a batch")],
)
def test_two_processes(tmp_path, stuck, place, way, phase):
    check(tmp_path / "run", 2, stuck, place, way, phase)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stuck", "place", "way", "phase"),
    [
        *((index, "in_callback", "sleeps", "running a step") for index in range(4)),
        *((index, "in_data", "waits_for_lock", "loading a batch") for index in (0, 3)),
        *((index, "in_save", "sleeps", "saving") for index in (0, 2)),
        *((index, "in_background_save", "sleeps", "saving") for index in (0, 1)),
        *((index, "in_start", "sleeps", "opening data") for index in (0, 3)),
        *((index, "in_data", "keeps_gil", "loading a batch") for index in (0, 2)),
        *((index, "in_callback", "is_stopped", "running a step") for index in (0, 2)),
        *((index, "in_save", "is_stopped", "saving") for index in (0, 3)),
    ],
)
def test_four_processes(tmp_path, stuck, place, way, phase):
    check(tmp_path / "run", 4, stuck, place, way, phase)


@pytest.mark.slow
def test_a_run_goes_on_after_a_hang(tmp_path):
    """With the same losses to the bit as a run that never hung."""
    for code, output in ends(start_all(2, command(tmp_path / "calm", 2))):
        assert code == 0, output
    check(tmp_path / "run", 2, 1, "in_save", "sleeps", "saving")
    for code, output in ends(start_all(2, command(tmp_path / "run", 2))):
        assert code == 0, output
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    assert not list((tmp_path / "calm").glob("hangs/*/*"))


@pytest.mark.slow
def test_a_busy_run_is_no_hang(tmp_path):
    """With programs of several lengths, held-out losses and saves, while all cores are busy."""
    lengths = ["train.length_bucket=16", "train.pad_to_multiple_of=8"]
    sizes = ["train.variable_length=true", *lengths, "train.eval_every=2", "data.source=stdlib"]
    others = busy(4)
    try:
        line = command(tmp_path, 2, *sizes, "checkpoint.every=2", "train.steps=30")
        found = ends(start_all(2, line), timeout=900)
    finally:
        for process in others:
            process.kill()
            process.wait()
    for code, output in found:
        assert code == 0, output
    assert not list(tmp_path.glob("hangs/*"))


@pytest.mark.slow
def test_a_single_process(tmp_path):
    line = command(tmp_path / "run", 2, f"runtime.hang_timeout={TIMEOUT}", "runtime.cpu_devices=2")
    at = line.index("-m")
    line[at : at + 2] = [SCRIPT, "0", "in_data", "sleeps"]
    note = str(tmp_path / "stuck-since")
    ((code, output),) = ends([start(line, {"STUCK_SINCE": note})])
    assert code == CODE, output
    assert "process 0" in output
    assert "loading a batch (step 5)" in output
    (file,) = (tmp_path / "run").glob("hangs/*/process-0.txt")
    assert "stuck.py" in file.read_text()


STOPPED = """
import time
from jaxpipe.runtime import position
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.watchdog import Watchdog

with Watchdog(4.0, Group()):
    position.enter("data")
    print("started", flush=True)
    for _ in range(25):  # 2.5 seconds, and as long as the process is stopped
        time.sleep(0.1)
"""


@pytest.mark.extended
def test_a_process_that_was_stopped_and_goes_on_is_not_stuck():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
