"""Runs of several processes on this machine, and hosts that stall."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from commands import start

REPOSITORY = Path(__file__).parents[2]

# Python imports this before anything else: now and then the main thread pauses for a while, as on
# a host that swaps, or whose cores are given to others. Collectives of the step in progress go on
# meanwhile, in other threads.
STALLS = """
import os, random, signal, threading, time

def sleep(*_):
    time.sleep(chance.uniform(0.2, 0.7))

def disturb():
    while True:
        time.sleep(chance.uniform(0.3, 1.5))
        os.kill(os.getpid(), signal.SIGUSR2)

if "JAX_PROCESS_ID" in os.environ and "STALL_SEED" in os.environ:
    chance = random.Random(f"{os.environ['STALL_SEED']} {os.environ['JAX_PROCESS_ID']}")
    signal.signal(signal.SIGUSR2, sleep)
    threading.Thread(target=disturb, daemon=True).start()
"""


def start_all(count, command, environment=(), folders=None):
    """Start `count` processes of one run with that command, each in its folder if given."""
    places = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        **dict(environment),
    }
    return [
        start(command, places | {"JAX_PROCESS_ID": str(index)}, cwd=folder)
        for index, folder in enumerate(folders or [None] * count)
    ]


def stalling(folder, seed):
    """Return the environment of processes that stall, each at different times."""
    (folder / "sitecustomize.py").write_text(STALLS)
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}", "STALL_SEED": str(seed)}


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def ends(group, timeout=200):
    """Wait, and return `(exit code, output)` of every process."""
    found = []
    for process in group:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in group:
                other.kill()
            raise
        found.append((process.returncode, output))
    return found


def wait_for_step(directory, step):
    """Wait until that step is logged."""
    path = Path(directory) / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def busy(count):
    """Start `count` processes that keep cores busy."""
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
