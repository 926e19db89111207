"""Which process makes steps slow: its data loader, its host, or the ops and links of its devices.

All processes take equally long for a step, because they wait for each other. Therefore each
measures what only it adds: the time in which its devices have nothing to do since its own host has
not dispatched the next step yet. With `log.bubble_every` the recorded steps add the time of every
op (`schedules/timing/lost_time.py`). Reports go through the coordination service, from a thread:
process 0 reads the reports of a window when the next window is over, so no process waits for
another.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jaxpipe.run.measure.bubble import devices_by_replica, recorded_grid
from jaxpipe.run.measure.slow_process import Blame, Finding, StragglerWindow, find_op, find_process
from jaxpipe.runtime import processes
from jaxpipe.runtime.watchdog import place_of
from jaxpipe.schedules.timing.lost_time import MeasuredScan, RankSeconds
from jaxpipe.schedules.timing.recording import RankTicks
from jaxpipe.training.trainer import Trainer

_EVERY = 10  # steps between two reports
_KEYS = "jaxpipe/stragglers"
_KEPT = 3  # windows whose reports are kept in the service


class _Dispatch(NamedTuple):
    """A dispatched program and its host times [s]."""

    program: range  # numbers of its steps
    asked: float  # when its batch was asked for
    dispatched: float
    result: Any  # an array that is ready when the program has ended
    is_regular: bool


class Stragglers:
    """Measures this process, and on process 0 names the one that slows the run; a context manager.

    A run of one process is only measured in recorded steps. With `log.stragglers = "off"` all
    methods do nothing.
    """

    def __init__(self, trainer: Trainer, say: Callable[[str], None]):
        log = trainer.config.log
        self._active = log.stragglers == "auto" and (processes.several() or log.bubble_every)
        self._trainer, self._say = trainer, say
        self._queue: SimpleQueue[_Dispatch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stragglers", daemon=True)
        self._ticks: dict[int, RankTicks] = {}
        self._series: dict[str, Any] = {}
        self._host, self._ops = Blame(), Blame()

    def __enter__(self) -> "Stragglers":
        if self._active:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._queue.put(None)
            self._thread.join(5)

    def note(
        self, program: range, asked: float, dispatched: float, result: Any, *, is_regular: bool
    ) -> None:
        """Note the dispatch of a program.

        Args:
          program: numbers of its steps.
          asked, dispatched: host times when its batch was asked for, and before the dispatch [s].
          result: one of its results.
          is_regular: whether no process did something else since the previous program, such as a
            save, so that the times of this program count.
        """
        if self._active:
            self._queue.put(_Dispatch(program, asked, dispatched, result, is_regular))

    def note_ticks(self, ticks: Mapping[int, RankTicks]) -> None:
        """Note the ticks of this process's devices in a recorded step, by replica."""
        if self._active:
            self._ticks = dict(ticks)

    def take(self) -> dict[str, Any]:
        """The newest metrics, once; empty on other processes than the first."""
        series, self._series = self._series, {}
        return series

    def _run(self) -> None:
        """Measure until the run ends; a failure of a device is reported by the main thread."""
        window, before = StragglerWindow(0, self._name), 0.0
        while (dispatch := self._queue.get()) is not None:
            try:
                jax.block_until_ready(dispatch.result)
                now = time.perf_counter()
                steps = len(dispatch.program)
                if dispatch.is_regular:
                    window.add(before, dispatch.asked, dispatch.dispatched, now, steps)
                before = now
                window.steps, window.step = window.steps + steps, dispatch.program[-1]
                if window.steps >= _EVERY:
                    self._report(window)
                    window = StragglerWindow(window.number + 1, self._name)
            except jax.errors.JaxRuntimeError:
                return

    def _report(self, window: StragglerWindow) -> None:
        """Publish a window; process 0 also judges the window before it."""
        ticks, self._ticks = self._ticks, {}
        window.ops = {
            f"{rank}/{replica}": RankSeconds.of(of_rank)
            for replica, of_ranks in ticks.items()
            for rank, of_rank in of_ranks.items()
        }
        index, count = processes.place()
        processes.post(f"{_KEYS}/{window.number % _KEPT}", msgspec.json.encode(window).decode())
        if index:
            return
        if count == 1:
            self._judge([window])
            return
        texts = processes.posted(f"{_KEYS}/{(window.number - 1) % _KEPT}")
        windows = [msgspec.json.decode(texts[i], type=StragglerWindow) for i in sorted(texts)]
        # The first window has what happens once in a process, such as compilation.
        if len(windows) == count and all(each.number == window.number - 1 > 0 for each in windows):
            self._judge(windows)

    def _judge(self, windows: list[StragglerWindow]) -> None:
        """Make metrics of the reports of all processes, and name a culprit."""
        step, seconds = windows[0].step, float(np.median([each.seconds for each in windows]))
        series: dict[str, Any] = {}
        if len(windows) > 1 and seconds:
            for cause in ("data", "host"):
                series[f"{cause}_idle_seconds"] = [getattr(each, cause) for each in windows]
            worst = find_process(windows, lambda process, late: self._cost(process, late, seconds))
            series["lost_seconds"] = worst.lost
            self._tell(self._host, worst, seconds, step - windows[0].steps + 1, step)
        measured = {_place(at): of for each in windows for at, of in each.ops.items()}
        if len(measured) == self._columns.size:
            costs = self._replay.lost_times(measured)
            lost_by_rank = np.zeros(len(self._columns))
            for each in costs:
                lost_by_rank[each.pp_rank] = max(lost_by_rank[each.pp_rank], each.seconds)
            series["rank_lost_seconds"] = lost_by_rank.tolist()
            if costs:
                process = self._columns[costs[0].pp_rank, costs[0].replica].process_index
                worst = find_op(costs[0], windows[process], process)
                self._tell(self._ops, worst, seconds, step, step)
        self._series = series

    def _tell(self, blame: Blame, worst: Finding, seconds: float, first: int, last: int) -> None:
        if sentence := blame.add(worst, seconds, first, last):
            self._say(sentence)

    def _cost(self, process: int, late: float, seconds: float) -> float:
        """Time that a step loses if the devices of a process start late, by the simulator [s]."""
        own = np.vectorize(lambda device: device.process_index == process)(self._columns)
        ranks = np.flatnonzero(own.any(axis=1)).tolist()
        return max(self._replay.late_start(rank, late, seconds) for rank in ranks)

    @cached_property
    def _name(self) -> str:
        place = place_of(self._trainer.mesh)
        return socket.gethostname() + (f", {place}" if place else "")

    @cached_property
    def _columns(self) -> np.ndarray:
        return devices_by_replica(self._trainer.mesh)

    @cached_property
    def _replay(self) -> MeasuredScan:
        trainer = self._trainer
        grid, costs = recorded_grid(trainer.pipeline), trainer.plan.costs
        return MeasuredScan(trainer.schedule, trainer.execution.lockstep, grid, costs)


def _place(text: str) -> tuple[int, int]:
    """Pipeline rank and replica, from "rank/replica"."""
    rank, _, replica = text.partition("/")
    return int(rank), int(replica)
