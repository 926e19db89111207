"""The ticks of a profiled step, recovered from the permutes in the recording.

Every tick starts with the same collective permutes on all ranks, so the n-th permute on a device
starts tick n, and the grid of the schedule gives the cell of that rank. The time inside a permute
is the message and the wait for neighbours; the time from there to the next permute is compute.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jaxpipe.core.schedule import Cell, Op, label

_PERMUTES = ("ppermute", "collective-permute")


class ProfileError(RuntimeError):
    """Raised for a recording without recognizable ticks; the text is one sentence for the user."""


@dataclass(frozen=True)
class Event:
    """An operation of the compiled program on one device, in seconds on a common clock."""

    device: int
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Tick:
    """One tick of one rank: permutes run from `begin` to `compute_begin`, compute to `end`."""

    number: int
    cell: Cell
    begin: float
    compute_begin: float
    end: float


RankTicks = Mapping[int, Sequence[Tick]]


def match_ticks(
    events: Iterable[Event],
    grid: Sequence[Sequence[Cell]],
    ranks: Mapping[int, int],
    *,
    phases: int = 1,
) -> RankTicks:
    """Return the ticks of every requested rank.

    Args:
      events: the recorded operations, in any order.
      grid: the cells of the schedule, `[tick][rank]`.
      ranks: pipeline rank by device, for the devices to read.
      phases: as in `Lockstep`.

    Raises `ProfileError` where a device is missing or no permute runs once per tick.
    """
    by_device = defaultdict(list)
    for event in events:
        if event.device in ranks:
            by_device[event.device].append(event)
    ticks_by_rank = {}
    for device, recorded in by_device.items():
        cells = [row[ranks[device]] for row in grid]
        ticks_by_rank[ranks[device]] = _match_device(recorded, cells, phases)
    if set(ticks_by_rank) != set(ranks.values()):
        raise ProfileError("the recording lacks some of the devices: was it another run's?")
    return dict(sorted(ticks_by_rank.items()))


def _match_device(events: list[Event], cells: list[Cell], phases: int) -> list[Tick]:
    permutes = [event for event in events if event.name.startswith(_PERMUTES)]
    counts = Counter(event.name for event in permutes)
    shares = {len(cells[phase::phases]) for phase in range(phases)}
    runs = [
        sorted((e for e in permutes if e.name == name), key=lambda event: event.begin)
        for name, count in counts.items()
        if count in shares
    ]
    if phases > 1:  # one permute per phase, of which a tick runs one
        runs = [sorted((e for run in runs for e in run), key=lambda event: event.begin)]
    if not runs or len(runs[0]) != len(cells):
        raise ProfileError(
            f"the recording has no exchange that runs once in each of {len(cells)} ticks, but "
            f"{dict(counts)}: a pipeline of one rank has none."
        )
    begins = [min(each.begin for each in tick) for tick in zip(*runs)]
    works = [max(each.end for each in tick) for tick in zip(*runs)]
    # An operation of the last tick has run in earlier ticks; one after the loop has not.
    of_loop = {event.name for event in events if begins[0] < event.begin < begins[-1]}
    last = (event.end for event in events if event.begin >= works[-1] and event.name in of_loop)
    ends = [*begins[1:], max(last, default=works[-1])]
    return [Tick(*each) for each in zip(range(len(cells)), cells, begins, works, ends)]


def rank_bubbles(ranks: RankTicks) -> dict[int, float]:
    """Return per rank the share of the scan's time in which it computes no action."""
    begin = min(ticks[0].begin for ticks in ranks.values())
    end = max(ticks[-1].end for ticks in ranks.values())
    return {
        rank: 1 - sum(t.end - t.compute_begin for t in ticks if t.cell.actions) / (end - begin)
        for rank, ticks in ranks.items()
    }


def median_op_seconds(ranks: RankTicks) -> dict[tuple[Op, int], float]:
    """Return median seconds by op and stage, from the ticks with a single action."""
    seconds = defaultdict(list)
    for ticks in ranks.values():
        for tick in ticks:
            if len(tick.cell.actions) == 1:
                (action,) = tick.cell.actions
                seconds[action.op, action.stage].append(tick.end - tick.compute_begin)
    return {key: median(times) for key, times in sorted(seconds.items(), key=lambda k: str(k[0]))}


def write_trace(ranks: RankTicks, path: Path) -> None:
    """Write JSON for Perfetto or chrome://tracing: a track per rank, a box per tick and permute."""
    start = min(ticks[0].begin for ticks in ranks.values())
    every = (action for ticks in ranks.values() for tick in ticks for action in tick.cell.actions)
    stages = any(action.stage >= len(ranks) for action in every)  # a rank has several
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
            events.append(box(rank, tick, "exchange", tick.begin, tick.compute_begin))
            name = label(*tick.cell.actions, stages=stages) or "idle"
            events.append(box(rank, tick, name, tick.compute_begin, tick.end))
    path.write_text(json.dumps({"traceEvents": events}))
