"""When every value that waits is written and last read, and slots by these intervals.

A slot is taken from the tick it is written to the tick it is last read, both included. Slots are
coloured greedily by start, which for intervals uses the fewest possible: the most that are ever
alive at once.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from jaxpipe.schedule.action import Action, Op, Schedule
from jaxpipe.schedule.cells import Grid
from jaxpipe.schedule.lanes import Message
from jaxpipe.schedule.lockstep import Lockstep

Interval = tuple[int, int]  # first and last tick
Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class Buffers(NamedTuple, Generic[T]):
    """One thing of each buffer: of messages, and of the lifetimes of activations.

    `inbox`: y or dx from when it is stored until it is read. `for_b`: residuals from F to B.
    `for_w`: residuals from F to W. `stash`: from B to W. An unsplit gradient is both B and W, and
    stashes nothing. Where the ends' gradients are deferred, `head`: what the loss leaves for W of
    the last stage; `embed`: dx of stage 0 until its W. Where sequences are sliced, `state`: what
    the slices of a sequence leave for each other in a stage, from its first F to its last B;
    `dstate`: the gradient at it, from its first B to its last.
    """

    inbox: T
    for_b: T
    for_w: T
    stash: T
    head: T
    embed: T
    state: T
    dstate: T


class Owner(NamedTuple):
    """Whose activations a slot holds: those of a microbatch in a stage.

    What slices of a sequence share is the first slice's.
    """

    stage: int
    microbatch: int


def owner_of(action: Action) -> Owner:
    """Whose activations an action makes or takes."""
    return Owner(action.stage, action.microbatch)


def sequence_of(action: Action, schedule: Schedule) -> Owner:
    """Who owns what the slices of an action's sequence share."""
    first = action.microbatch - action.microbatch % schedule.slices
    return Owner(action.stage, first)


def lifetimes(
    schedule: Schedule, grid: Grid, inputs: dict[Action, Message], lockstep: Lockstep
) -> list[Buffers[dict[Hashable, Interval]]]:
    """Every rank's intervals by buffer: of the inbox by the reading action, else by `Owner`."""
    when = {
        action: tick for tick, row in enumerate(grid) for cell in row for action in cell.actions
    }
    alive = [Buffers(*({} for _ in Buffers._fields)) for _ in range(schedule.pp)]
    if schedule.slices > 1:
        _add_states(alive, schedule, when)
    for action, message in inputs.items():
        if message.stored is not None:
            alive[message.receiver].inbox[action] = (message.stored, message.read)
    for forward, start in when.items():
        if forward.op is not Op.F:
            continue
        of_rank = alive[schedule.placement.rank(forward.stage, forward.microbatch)]
        if lockstep.vocab_parallel and forward.stage == 0:
            of_rank.inbox[forward] = (start, start)
        owner = owner_of(forward)
        both, b, w = (when.get(forward._replace(op=op)) for op in (Op.BW, Op.B, Op.W))
        if both is not None:
            b = w = both
        elif b is None:
            continue
        else:
            of_rank.stash[owner] = (b, w)
        of_rank.for_b[owner] = (start, b)
        of_rank.for_w[owner] = (start, w)
        if lockstep.defer_ends and forward.stage == schedule.stages - 1:
            of_rank.head[owner] = (start, w)
        if lockstep.defer_ends and forward.stage == 0:
            of_rank.embed[owner] = (b, w)
    return alive


def _add_states(
    alive: list[Buffers[dict[Hashable, Interval]]], schedule: Schedule, when: dict[Action, int]
) -> None:
    """When a stage holds what the slices of a sequence share."""
    for action, tick in when.items():
        sequence = sequence_of(action, schedule)
        of_rank = alive[schedule.placement.rank(action.stage, action.microbatch)]
        if action.op is not Op.W:
            _extend(of_rank.state, sequence, tick)
        if action.op in (Op.B, Op.BW):
            _extend(of_rank.dstate, sequence, tick)


def _extend(intervals: dict[Hashable, Interval], key: Hashable, tick: int) -> None:
    first, last = intervals.get(key, (tick, tick))
    intervals[key] = (min(first, tick), max(last, tick))


def colour(intervals: Iterable[tuple[Key, Interval]]) -> dict[Key, int]:
    """The lowest free slot for each closed interval `(first, last)`, taken in order of start.

    >>> colour([("a", (0, 2)), ("b", (1, 3)), ("c", (3, 4))])
    {'a': 0, 'b': 1, 'c': 0}
    """
    slots: dict[Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (last tick, slot)
    for key, (first, last) in sorted(intervals, key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[key] = slot
        heapq.heappush(busy, (last, slot))
    return slots
