"""Competitors as groups of processes, each pinned to one core, that take commands as JSON lines."""

import json
import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Self

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # /proc counts in these
# Freed memory stays with its process: a virtual machine may give it to others between two steps,
# and to get it back takes up to a fifth of a step. Steps that follow each other do not pay that. It
# is in huge pages, of which a virtual machine has fewer to look up.
_MEMORY = ("mmap_max=0", "trim_threshold=17179869184", "arena_max=1", "hugetlb=1")
_ONE_THREAD = {name: "1" for name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
_TUNED = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _MEMORY)}


class BenchError(RuntimeError):
    """A measurement that cannot be made; the text is one sentence for the user."""


class Group:
    """The ranks of one program, each on a core, in turn; leaving the context ends them.

    `program` is the command line; each process gets one more argument, a JSON object with `rank`,
    `size` and `port`. They keep freed memory until they `rest`, unless it is the memory that is
    measured.
    """

    def __init__(
        self, name: str, program: Sequence[str], size: int, *, measures_memory: bool = False
    ):
        self.name, self._rests = name, True
        port = _free_port()
        cores = sorted(os.sched_getaffinity(0))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._processes = [
            subprocess.Popen(
                [*program, json.dumps({"rank": rank, "size": size, "port": port})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=os.environ | _ONE_THREAD | ({} if measures_memory else _TUNED),
            )
            for rank in range(size)
        ]
        for rank, process in enumerate(self._processes):  # which has no threads yet
            os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
        self.versions = self._answers()

    def ask(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """Send all ranks one command and wait for their answers."""
        self._rests = False
        for process in self._processes:
            try:
                print(json.dumps({"do": do, **command}), file=process.stdin, flush=True)
            except OSError as error:
                raise BenchError(f"a process of {self.name} is gone ({error}).") from error
        return self._answers()

    def rest(self) -> None:
        """Have them give freed memory back, if they have done anything since they last did."""
        if not self._rests:
            self.ask("rest")
        self._rests = True

    def cpu_seconds(self) -> float:
        """Processor time that the processes have used so far."""
        return sum(user + system for _, user, system in self._counts()) / _TICK

    def fresh_bytes(self) -> int:
        """Memory that the processes have touched for the first time so far."""
        return sum(faults for faults, _, _ in self._counts()) * PAGESIZE

    def _counts(self) -> list[tuple[int, int, int]]:
        """Of each process: pages it was first to touch, ticks of its own and of the kernel's."""
        found = []
        for process in self._processes:
            with open(f"/proc/{process.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            found.append((int(fields[7]), int(fields[11]), int(fields[12])))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._errors.close()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self._processes]
        if not all(lines):
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise BenchError(f"a process of {self.name} ended before it answered: {last}")
        return [json.loads(line) for line in lines]


def seconds_of(answers: list[dict[str, Any]]) -> float:
    """Of one step, from the first rank's begin to the last rank's end."""
    return max(a["end"] for a in answers) - min(a["begin"] for a in answers)


def loss_of(answers: list[dict[str, Any]], name: str) -> list[float]:
    """Losses of some steps, from the rank that knows them: of others they are 0."""
    return max(a[name] for a in answers)


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def machine_busy_seconds() -> float:
    """Processor time of all processes on all cores since boot, and what a hypervisor took."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, _, _, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + steal) / _TICK
