"""The bubble of steps recorded by the profiler during a run, and the simulator's prediction."""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.core.executor import Pipeline
from jaxpipe.core.executor.ticks import closing_tick, opening_tick
from jaxpipe.core.schedule import simulate
from jaxpipe.core.schedule.lower import build_grid
from jaxpipe.core.schedule.placing import Grid
from jaxpipe.run.measure.recording import recording
from jaxpipe.schedules.timing.recording import (
    Event,
    ProfileError,
    RankTicks,
    match_ticks,
    rank_bubbles,
)
from jaxpipe.training.compiled import CompiledSteps
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any


class BubbleMeter:
    """Runs steps and records every `log.bubble_every`-th of them, except the first of the run.

    A recorded step starts after the steps before it have ended. Its metrics get `bubble`, the mean
    over this process's pipeline ranks in one replica, and `bubble_predicted`, the simulator's value
    for the scan. Steps that run in one program all get its values.
    `note_ticks` gets the ticks of a recorded step by replica, for those that this process has.
    """

    def __init__(
        self, trainer: Trainer, steps: CompiledSteps, say: Callable[[str], None],
        note_ticks: Callable[[Mapping[int, RankTicks]], None] = lambda ticks: None,
    ):  # fmt: skip
        self._trainer, self._steps, self._say = trainer, steps, say
        self._note_ticks = note_ticks
        self._every = trainer.config.log.bubble_every
        self._compiled = False

    def run(self, numbers: range, state: State, batch: Tree) -> tuple[State, dict[str, Any]]:
        """Run the steps of one program; return the state and the metrics.

        Args:
          numbers: the numbers of the steps; metrics are stacked if there are several.
          state: donated to the program.
          batch: the microbatches of all these steps, on the devices.
        """
        several = len(numbers) > 1
        step = self._steps.train_steps if several else self._steps.train_step
        due = self._compiled and self._every and any(n % self._every == 0 for n in numbers)
        self._compiled = True
        if not due:
            return step(state, batch)
        state = jax.block_until_ready(state)
        pipeline = self._steps.fused.pipeline if several else self._trainer.pipeline
        results: list[tuple[State, dict[str, Any]]] = []
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                _, found = recorded(lambda: _keep(results, step(state, batch)), Path(folder))
                if several and not self._steps.fused.are_one_overlap(results[0][1]):
                    return results[0]  # its ticks are not those of the schedule
                events = list(found)
                by_replica = {r: ticks(pipeline, events, r) for r in local_replicas(pipeline)}
                bubbles = rank_bubbles(next(iter(by_replica.values())))
                if not several:
                    self._note_ticks(by_replica)
        except (ProfileError, OSError) as error:  # a full disk: the step itself may have run
            self._say(f"log.bubble_every: {error}; no more steps are recorded")
            self._every = 0
            return results[0] if results else step(state, batch)
        state, metrics = results[0]
        both = {"bubble": fmean(bubbles.values()), "bubble_predicted": self._predicted(pipeline)}
        if several:
            return state, metrics | {name: np.full(len(numbers), of) for name, of in both.items()}
        return state, metrics | both

    def _predicted(self, pipeline: Pipeline) -> float:
        plan = self._trainer.plan
        return simulate(pipeline.schedule, plan.costs, plan.lockstep).bubble_scan


def _keep(results: list[Tree], result: Tree) -> Tree:
    results.append(jax.block_until_ready(result))
    return result


def recorded(run: Callable[[], Tree], folder: Path) -> tuple[Tree, Iterator[Event]]:
    """Call `run` and record it; return its result and the operations of its compiled programs.

    The profiler's files stay in `folder`. Raises `OSError` where they cannot be written.
    """
    with recording(folder):
        result = jax.block_until_ready(run())
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    return result, events_of(newest)


def ticks(pipeline: Pipeline, events: Iterable[Event], replica: int = 0) -> RankTicks:
    """The ticks of a recorded step, for this process's pipeline ranks of one replica.

    Only ticks within the scan are included: those before and after it (`overlap_sums`) are other
    operations.
    Raises `ProfileError` where the recording does not show the ticks.
    """
    own, how = jax.process_index(), pipeline.execution
    devices = enumerate(devices_by_replica(pipeline.mesh)[:, replica])
    return match_ticks(
        events,
        recorded_grid(pipeline),
        {device.id: rank for rank, device in devices if device.process_index == own},
        phases=how.lockstep.phases,
    )


def recorded_grid(pipeline: Pipeline) -> Grid:
    """The cells of the ticks within the scan, `[T][P]`."""
    tables, how = pipeline.tables, pipeline.execution
    opening = opening_tick(tables, how)
    begin = 0 if opening is None else opening + 1
    return build_grid(pipeline.schedule, how.lockstep)[begin : closing_tick(tables, how)]


def devices_by_replica(mesh: Mesh) -> np.ndarray:
    """The devices, `[pipeline rank, replica]`; devices that share a layer count as replicas."""
    return mesh.devices.reshape(len(mesh.devices), -1)


def local_replicas(pipeline: Pipeline) -> list[int]:
    """Numbers of the replicas in which this process has a device."""
    devices = devices_by_replica(pipeline.mesh).T
    own = jax.process_index()
    return [r for r, of in enumerate(devices) if any(d.process_index == own for d in of)]


def events_of(recording: Path) -> Iterator[Event]:
    """Yield the operations of compiled programs from the profiler's gzipped trace file."""
    with gzip.open(recording) as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("name") == "process_name"]
    devices = {event["pid"]: _device(event["args"]["name"]) for event in named}
    for event in events:
        about = event.get("args", {})
        where = about.get("device_ordinal", devices.get(event.get("pid")))
        if event.get("ph") == "X" and "hlo_op" in about and where is not None:
            begin = event["ts"] / 1e6
            yield Event(int(where), about["hlo_op"], begin, begin + event["dur"] / 1e6)


def _device(process: str) -> int | None:
    """The device number in a trace process name such as `/device:GPU:0`; None: no device."""
    kind, _, number = process.rpartition(":")
    return int(number) if "/device:" in kind and number.isdecimal() else None
