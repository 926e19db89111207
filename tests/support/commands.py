"""The training command in separate processes, and the files in its run directory."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
# A compilation cache for all processes that the tests of one run start. These may be killed while
# they write to it, so the next run does not reuse it.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
PROGRAMS = Path(tempfile.gettempdir()) / f"jaxpipe-programs-{RUN}"
atexit.register(shutil.rmtree, PROGRAMS, ignore_errors=True)


def train_command(directory, *overrides, devices):
    """Return the command line of a run of `data/small.toml` in that directory."""
    command = [sys.executable, "-m", "jaxpipe.train", str(SMALL), f"run.dir={directory}"]
    return [*command, f"runtime.cpu_devices={devices}", *overrides]


def start(command, environment=(), **options):
    """Start a process; its output and errors are both read from `stdout`."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
        env={
            **os.environ,
            "PYTHONPATH": str(SMALL.parents[2]),
            "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            **dict(environment),
        },
    )  # fmt: skip


def metrics(directory):
    """Return the logged lines, by step."""
    text = (Path(directory) / "metrics.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def losses(directory):
    """Return the loss by step."""
    return {step: line["loss"] for step, line in metrics(directory).items()}


def complete(directory):
    """Return the steps of checkpoints with final names, oldest first."""
    saves = Path(directory) / "checkpoints"
    if not saves.exists():
        return []
    return sorted(int(path.name) for path in saves.iterdir() if path.name.isdecimal())
