"""The bubble of a step that is recorded while a run goes on, beside the one that was predicted."""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import jax

from jaxpipe.pipeline.ticks import closing_tick
from jaxpipe.planning import Candidate, estimate, op_seconds
from jaxpipe.planning.candidates import variant_of
from jaxpipe.schedule.lower import grid_of
from jaxpipe.schedule.recorded import Event, ProfileError, Ranks, bubbles, ticks_of
from jaxpipe.training.recording import recording
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
Step = Callable[[State, Tree], tuple[State, dict[str, Any]]]


class BubbleMeter:
    """Runs the steps of a run, and records every `log.bubble_every`-th of them, but not its first.

    Such a step waits for those before it, and its metrics have `bubble`, the mean over the ranks of
    this process, and `bubble_predicted`, the simulator's for the scan.
    """

    def __init__(self, trainer: Trainer, train_step: Step, say: Callable[[str], None]):
        self._trainer, self._train_step, self._say = trainer, train_step, say
        self._every = trainer.config.log.bubble_every
        self._compiled = False

    def step(self, number: int, state: State, batch: Tree) -> tuple[State, dict[str, Any]]:
        """The state and the metrics of this step."""
        due = self._compiled and self._every and number % self._every == 0
        self._compiled = True
        if not due:
            return self._train_step(state, batch)
        state = jax.block_until_ready(state)
        with tempfile.TemporaryDirectory() as folder:
            (state, metrics), events = recorded(
                lambda: self._train_step(state, batch), Path(folder)
            )
            try:
                found = bubbles(ticks(self._trainer, events))
            except ProfileError as error:
                self._say(f"log.bubble_every: {error}")
                self._every = 0
                return state, metrics
        mean = fmean(found.values())
        return state, metrics | {"bubble": mean, "bubble_predicted": self._predicted}

    @cached_property
    def _predicted(self) -> float:
        config, choice = self._trainer.config, self._trainer.choice
        own = Candidate(variant_of(config), choice, configured=True)
        return estimate(config, own, op_seconds(config)).report.bubble_scan


def recorded(run: Callable[[], Tree], folder: Path) -> tuple[Tree, Iterator[Event]]:
    """What a call returns, once it is done, and the operations of its compiled programs.

    The profiler's own recording is left in the folder. Raises `OSError` where it cannot be written.
    """
    with recording(folder):
        made = jax.block_until_ready(run())
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    return made, events_of(newest)


def ticks(trainer: Trainer, events: Iterator[Event]) -> Ranks:
    """The ticks of a recorded step, of the ranks of this process's part of the first replica.

    They are those of the loop: ticks behind it (`overlap_sums`) are other operations. Raises
    `ProfileError` where the recording does not show them.
    """
    first = enumerate(trainer.mesh.devices[:, 0, 0, 0, 0])
    own, how = jax.process_index(), trainer.execution
    return ticks_of(
        events,
        grid_of(trainer.schedule, how.lockstep)[: closing_tick(trainer.pipeline.tables, how)],
        {device.id: rank for rank, device in first if device.process_index == own},
        turns=how.lockstep.turns,
        stages=trainer.schedule.labels_stages,
    )


def events_of(recording: Path) -> Iterator[Event]:
    """The operations of compiled programs, by device, in what the profiler wrote for viewers."""
    with gzip.open(recording) as file:
        found = json.load(file)["traceEvents"]
    named = [event for event in found if event.get("name") == "process_name"]
    devices = {event["pid"]: _device(event["args"]["name"]) for event in named}
    for event in found:
        about = event.get("args", {})
        where = about.get("device_ordinal", devices.get(event.get("pid")))
        if event.get("ph") == "X" and "hlo_op" in about and where is not None:
            begin = event["ts"] / 1e6
            yield Event(int(where), about["hlo_op"], begin, begin + event["dur"] / 1e6)


def _device(process: str) -> int | None:
    """The device that a process of the recording stands for, named as `/device:GPU:0`."""
    kind, _, number = process.rpartition(":")
    return int(number) if "/device:" in kind and number.isdecimal() else None
