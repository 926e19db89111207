"""Groups of processes, each pinned to one core, that take commands as JSON lines."""

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)
QUIET = 0.06  # share of a core that other processes may use during a step that is kept
_TRIES = 3  # runs of a step that other processes disturb
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # /proc's ticks per second
# A process keeps its freed memory: a virtual machine may give freed pages to others between two
# steps, and faulting them in again takes up to a fifth of a step, which consecutive steps of a
# training run do not pay. Huge pages make address translation cheaper in a virtual machine.
_MEMORY = ("mmap_max=0", "trim_threshold=17179869184", "arena_max=1", "hugetlb=1")
_ENVIRONMENT = dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _MEMORY)
}


class BenchError(RuntimeError):
    """A measurement that cannot be made; the text is one sentence for the user."""


class ProcessGroup:
    """The processes of one program, pinned to cores round-robin; leaving the context kills them.

    Args:
        name: for errors.
        program: command line; each process gets one more argument, a JSON object with `rank`,
            `size` and `port`.
        size: number of processes.
    """

    def __init__(self, name: str, program: Sequence[str], size: int):
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        cores = sorted(os.sched_getaffinity(0))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._processes = [
            subprocess.Popen(
                [*program, json.dumps({"rank": rank, "size": size, "port": port})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=os.environ | _ENVIRONMENT,
            )
            for rank in range(size)
        ]
        for rank, process in enumerate(self._processes):  # before threads start
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
        self.version = self._answers()[0]["ready"]

    def ask(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """Send one command to all processes and return their answers by rank.

        Raises:
            BenchError: a process has ended.
        """
        for process in self._processes:
            try:
                print(json.dumps({"do": do, **command}), file=process.stdin, flush=True)
            except OSError as error:
                raise BenchError(f"a process of {self.name} is gone ({error}).") from error
        return self._answers()

    def step_seconds(self, name: str, **how: Any) -> float:
        """Run a step; return its seconds, from the first rank's begin to the last rank's end."""
        answers = self.ask("step", name=name, **how)
        return max(a["end"] for a in answers) - min(a["begin"] for a in answers)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the processes have used so far."""
        stats = (Path(f"/proc/{process.pid}/stat").read_text() for process in self._processes)
        fields = (stat.rpartition(")")[2].split() for stat in stats)
        return sum(int(each[11]) + int(each[12]) for each in fields) / _TICK  # user and system

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._errors.close()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(lines):
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise BenchError(f"a process of {self.name} ended before it answered: {last}")
        return [json.loads(line) for line in lines]


def list_programs(torch: str | None) -> dict[str, list[str]]:
    """Return the command lines of each framework's process; `torch` is a Python that has torch."""
    programs = {"jaxpipe": [sys.executable, "-m", "jaxpipe.lab.bench.worker"]}
    if torch:
        programs["torch"] = [torch, str(Path(__file__).parent / "torch_worker.py")]
    return programs


def run_undisturbed(
    groups: Iterable[ProcessGroup], name: str, step: Callable[[], Any], patience: float = 30.0
) -> Any:
    """Return the result of a run of `step` that no other process disturbed.

    Args:
        groups: all processes of the measurement; CPU time of any other process is a disturbance.
        name: of the step, for the log.
        step: runs it.
        patience: longest wait for a quiet machine before each attempt [s].

    Returns:
        What `step` returns; None if every attempt was disturbed.
    """
    groups = tuple(groups)

    def others() -> float:
        """CPU seconds of other processes since boot, but for a constant."""
        own = time.process_time() + sum(group.cpu_seconds() for group in groups)
        return machine_busy_seconds() - own

    for _ in range(_TRIES):
        _wait_for_quiet(others, patience)
        begin, before = time.monotonic(), others()
        result = step()
        share = (others() - before) / (time.monotonic() - begin)
        logger.info("%s: %s; others used %.3f of a core", name, result, share)
        if share < QUIET:
            return result
    return None


def _wait_for_quiet(others: Callable[[], float], patience: float) -> None:
    """Wait until other processes use little CPU for half a second, or patience ends."""
    limit = time.monotonic() + patience
    while time.monotonic() < limit:
        before = others()
        time.sleep(0.5)
        if others() - before < QUIET / 2:
            return


def processor_name() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def machine_busy_seconds() -> float:
    """Return CPU seconds of all cores since boot, time stolen by a hypervisor included."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, _, _, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + steal) / _TICK
