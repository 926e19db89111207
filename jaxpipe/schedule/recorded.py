"""The ticks of a step that was recorded: who did what when, from the exchanges between them.

Every tick begins with the same collective permutes on all ranks, so the n-th of them on a device
begins tick n, and the grid of the schedule says what that rank does in it. The time inside an
exchange is the message and the wait for neighbours; the time up to the next one is work.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from jaxpipe.schedule import Cell, Op, label

_PERMUTES = ("ppermute", "collective-permute")


class ProfileError(RuntimeError):
    """A recording that does not show the ticks; the text is one sentence for the user."""


@dataclass(frozen=True)
class Event:
    """An operation of the compiled program on one device, in seconds of any common clock."""

    device: int
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Tick:
    """One tick of one rank: it meets the others from `begin` to `works`, and works until `end`."""

    number: int
    cell: Cell
    begin: float
    works: float
    end: float
    stages: bool = False  # whether its label names them

    @property
    def label(self) -> str:
        """The text of its cell, as schedules are drawn."""
        return label(*self.cell.actions, stages=self.stages) or "idle"


Ranks = Mapping[int, Sequence[Tick]]


def ticks_of(
    events: Iterable[Event],
    grid: Sequence[Sequence[Cell]],
    ranks: Mapping[int, int],
    *,
    turns: int = 1,
    stages: bool = False,
) -> Ranks:
    """The ticks of every recorded rank; `ranks` maps the devices that are wanted to theirs.

    `turns` of the lockstep; `stages`: the labels of ticks name them.

    Raises `ProfileError` where the recording has no permute that runs once a tick.
    """
    by_device = defaultdict(list)
    for event in events:
        if event.device in ranks:
            by_device[event.device].append(event)
    found = {}
    for device, recorded in by_device.items():
        cells = [row[ranks[device]] for row in grid]
        ticks = _of_device(recorded, cells, turns)
        found[ranks[device]] = [replace(tick, stages=stages) for tick in ticks]
    if set(found) != set(ranks.values()):
        raise ProfileError("the recording lacks some of the devices: was it another run's?")
    return dict(sorted(found.items()))


def _of_device(events: list[Event], cells: list[Cell], turns: int) -> list[Tick]:
    permutes = [event for event in events if event.name.startswith(_PERMUTES)]
    counts = Counter(event.name for event in permutes)
    shares = {len(cells[turn::turns]) for turn in range(turns)}
    runs = [
        sorted((e for e in permutes if e.name == name), key=lambda event: event.begin)
        for name, count in counts.items()
        if count in shares
    ]
    if turns > 1:  # a permute for each, and one of them a tick
        runs = [sorted((e for run in runs for e in run), key=lambda event: event.begin)]
    if not runs or len(runs[0]) != len(cells):
        raise ProfileError(
            f"the recording has no exchange that runs once in each of {len(cells)} ticks, but "
            f"{dict(counts)}: a pipeline of one rank has none."
        )
    begins = [min(each.begin for each in tick) for tick in zip(*runs)]
    works = [max(each.end for each in tick) for tick in zip(*runs)]
    # What runs in the last tick has run in others before; what comes after the loop has not.
    of_loop = {event.name for event in events if begins[0] < event.begin < begins[-1]}
    last = (event.end for event in events if event.begin >= works[-1] and event.name in of_loop)
    ends = [*begins[1:], max(last, default=works[-1])]
    return [Tick(*each) for each in zip(range(len(cells)), cells, begins, works, ends)]


def bubbles(ranks: Ranks) -> dict[int, float]:
    """Share of the loop's time in which a rank does nothing that the schedule asks for."""
    begin = min(ticks[0].begin for ticks in ranks.values())
    end = max(ticks[-1].end for ticks in ranks.values())
    return {
        rank: 1 - sum(t.end - t.works for t in ticks if t.cell.actions) / (end - begin)
        for rank, ticks in ranks.items()
    }


def op_seconds(ranks: Ranks) -> dict[tuple[Op, int], float]:
    """Median seconds of every op by stage, from the ticks that do nothing else."""
    found = defaultdict(list)
    for ticks in ranks.values():
        for tick in ticks:
            if len(tick.cell.actions) == 1:
                (action,) = tick.cell.actions
                found[action.op, action.stage].append(tick.end - tick.works)
    return {key: median(times) for key, times in sorted(found.items(), key=lambda k: str(k[0]))}


def write_trace(ranks: Ranks, path: Path) -> None:
    """As JSON for Perfetto or chrome://tracing: one track a rank, a box for each tick and wait."""
    start = min(ticks[0].begin for ticks in ranks.values())
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]

    def box(rank: int, tick: Tick, name: str, begin: float, end: float) -> dict[str, object]:
        return {
            "ph": "X", "pid": 0, "tid": rank, "name": name, "args": {"tick": tick.number},
            "ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin),
        }  # fmt: skip

    for rank, ticks in ranks.items():
        for tick in ticks:
            events.append(box(rank, tick, "exchange", tick.begin, tick.works))
            events.append(box(rank, tick, tick.label, tick.works, tick.end))
    path.write_text(json.dumps({"traceEvents": events}))
