"""Groups of processes, each pinned to one core, that take commands as JSON lines."""

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

    Freed memory stays with the processes until `rest`.

    Args:
        name: for errors.
        program: command line; each process gets one more argument, a JSON object with `rank`,
            `size` and `port`.
        size: number of processes.
    """

    def __init__(self, name: str, program: Sequence[str], size: int):
        self.name, self._rests = name, True
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
        self._rests = False
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

    def rest(self) -> None:
        """Return freed memory to the system if a command was sent since the last `rest`."""
        if not self._rests:
            self.ask("rest")
        self._rests = True

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the processes have used so far."""
        return sum(user + system for _, user, system in self._counts()) / _TICK

    def fresh_bytes(self) -> int:
        """Return the bytes of memory that the processes have faulted in so far."""
        return sum(faults for faults, _, _ in self._counts()) * PAGESIZE

    def _counts(self) -> list[tuple[int, int, int]]:
        """Return minor page faults, user ticks and system ticks of each process."""
        stats = (Path(f"/proc/{process.pid}/stat").read_text() for process in self._processes)
        fields = (stat.rpartition(")")[2].split() for stat in stats)
        return [(int(each[7]), int(each[11]), int(each[12])) for each in fields]

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
            last = (self._errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise BenchError(f"a process of {self.name} ended before it answered: {last}")
        return [json.loads(line) for line in lines]


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
