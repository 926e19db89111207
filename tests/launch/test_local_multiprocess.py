"""`local_multiprocess.sh`, whose processes are a fake Python or stand-ins for training."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from scripts import LAUNCH, run


@pytest.mark.parametrize(("codes", "code"), [("0 0 0", 0), ("0 3 0", 3), ("4 0 0", 4)])
def test_every_process_is_started_and_one_that_fails_is_told(tree, codes, code):
    ended, said, _ = run(tree, "local_multiprocess.sh", "3", "own.toml", CODES=codes)
    assert ended == code
    asked = sorted(line for line in said.splitlines() if "jaxpipe.train" in line)
    assert asked == [f"{tree}: {index} -m jaxpipe.train own.toml" for index in range(3)]


@pytest.mark.parametrize("codes", ["never 5 5", "5 never 5", "3 3 never"])
def test_a_stopped_process_is_killed_after_the_others(tree, codes):
    started = time.monotonic()
    code, _, _ = run(tree, "local_multiprocess.sh", "3", "own.toml", CODES=codes, JAXPIPE_GRACE="1")
    assert str(code) in codes.split()
    assert time.monotonic() - started < 20
    left = subprocess.run(["pgrep", "-f", str(tree)], capture_output=True, check=False)
    assert not left.stdout


# Tests in the background of a shell ignore INT, under nohup HUP, and so would their children.
FOREGROUND = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
# Saves for a while after a signal, or does not train yet.
STAND_IN = """
import os, pathlib, sys, time
from jaxpipe.run.signals import stop_signals

def touch(name):
    pathlib.Path(name + os.environ["JAX_PROCESS_ID"]).touch()

if sys.argv[1] == "starts":
    touch("ready")
    time.sleep(60)
with stop_signals() as received:
    touch("ready")
    while not received:
        time.sleep(0.01)
    time.sleep(0.5)
    touch("saved")
    sys.exit(128 + max(received))
"""


@pytest.mark.parametrize(
    ("signalled", "phase", "saved"),
    [("INT", "trains", 2), ("INT", "starts", 0), ("HUP", "trains", 2)],
)
def test_a_signal_of_the_terminal_stops_every_process_once(tree, signalled, phase, saved):
    run(tree, "train.sh", "own.toml")
    (tree / "stand_in.py").write_text(STAND_IN)
    script = tree / "launch" / "local_multiprocess.sh"
    process = subprocess.Popen(
        [sys.executable, "-c", FOREGROUND, script, "2", "own.toml"], cwd=tree,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "VERSION": "3.12.1", "PYTHONPATH": str(LAUNCH.parent),
             "CODES": "stand-in stand-in", "STAND_IN": f"{sys.executable} stand_in.py {phase}"},
    )  # fmt: skip
    try:
        while len(list(tree.glob("ready*"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, getattr(signal, f"SIG{signalled}"))
        assert process.wait(60) == (129 if signalled == "HUP" else 143)
        assert len(list(tree.glob("saved*"))) == saved
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [
        ("3 137 3", [3, 2, 1], 3),  # one is killed, one of the other two as well
        ("3 3 never", [3, 2], 3),  # one that hangs is killed by the script
        ("3 1 3", [3], 3),  # an error would come again
        ("127 3 3", [3], 3),  # as would a command that is not found
        ("137 143 3", [3], 3),
        ("139 134 137", [3], 137),  # none is left
        ("0 0 0", [3], 0),
    ],
)
def test_processes_that_are_left_start_again(tree, codes, starts, code):
    ended, said, _ = run(
        tree, "local_multiprocess.sh", "--restart", "3", "own.toml", CODES=codes, JAXPIPE_GRACE="1"
    )
    assert ended == code
    asked = sorted(line for line in said.splitlines() if "jaxpipe.train" in line)
    indices = sorted(index for count in starts for index in range(count))
    assert asked == [f"{tree}: {index} -m jaxpipe.train own.toml" for index in indices]
    notes = re.findall(r"jaxpipe: \d processes were killed; the other (\d) start again\n", said)
    assert list(map(int, notes)) == starts[1:]


@pytest.mark.parametrize("arguments", [(), ("0", "own.toml"), ("2",), ("own.toml", "2")], ids=str)
def test_a_number_of_processes_is_needed(tree, arguments):
    code, _, said = run(tree, "local_multiprocess.sh", *arguments)
    assert code == 2
    assert "usage: ./launch/local_multiprocess.sh [--restart] N CONFIG" in said
