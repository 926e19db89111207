"""When every value that waits is written and last read, and slots by these intervals.

A slot is taken from the tick it is written to the tick it is last read, both included. Slots are
coloured greedily by start, which for intervals uses the fewest possible: the most that are ever
alive at once.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from jaxpipe.schedule.action import Action, Op, Schedule
from jaxpipe.schedule.cells import Grid
from jaxpipe.schedule.lanes import Message

Intervals = dict[Hashable, tuple[int, int]]  # what -> (first tick, last tick)


class Slots(NamedTuple):
    """Something of each buffer: of messages, and of the lifetimes of activations.

    `inbox`: y or dx from when it is stored until it is read. `for_b`: residuals from F to B.
    `for_w`: residuals from F to W. `stash`: from B to W. An unsplit gradient is both B and W, and
    stashes nothing. Where the ends' gradients are deferred, `head`: what the loss leaves for W of
    the last stage; `embed`: dx of stage 0 until its W. Where sequences are sliced, `state`: what
    the slices of a sequence leave for each other in a stage, from its first F to its last B;
    `dstate`: the gradient at it, from its first B to its last.
    """

    inbox: object
    for_b: object
    for_w: object
    stash: object
    head: object
    embed: object
    state: object
    dstate: object


def lifetimes(
    schedule: Schedule,
    grid: Grid,
    inputs: dict[Action, Message],
    defer_ends: bool,
    vocab_parallel: bool,
) -> Slots:
    """For each buffer, every rank's intervals; messages by reader, the rest by action F."""
    when = {
        action: tick for tick, row in enumerate(grid) for cell in row for action in cell.actions
    }
    alive = Slots(*([{} for _ in range(schedule.pp)] for _ in Slots._fields))
    if schedule.slices > 1:
        _add_states(alive, schedule, when)
    for action, message in inputs.items():
        if message.stored is not None:
            alive.inbox[message.receiver][action] = (message.stored, message.read)
    for forward, start in when.items():
        if forward.op is not Op.F:
            continue
        rank = schedule.placement.rank(forward.stage, forward.microbatch)
        if vocab_parallel and forward.stage == 0:
            alive.inbox[rank][forward] = (start, start)
        both, b, w = (when.get(forward._replace(op=op)) for op in (Op.BW, Op.B, Op.W))
        if both is not None:
            b = w = both
        elif b is None:
            continue
        else:
            alive.stash[rank][forward] = (b, w)
        alive.for_b[rank][forward] = (start, b)
        alive.for_w[rank][forward] = (start, w)
        if defer_ends and forward.stage == schedule.stages - 1:
            alive.head[rank][forward] = (start, w)
        if defer_ends and forward.stage == 0:
            alive.embed[rank][forward] = (b, w)
    return alive


def _add_states(alive: Slots, schedule: Schedule, when: dict[Action, int]) -> None:
    """When a stage holds what the slices of a sequence share, by the F of the first of them."""
    for action in when:
        sequence = action._replace(op=Op.F, microbatch=sequence_of(action, schedule))
        rank = schedule.placement.rank(action.stage, action.microbatch)
        if action.op is not Op.W:
            _extend(alive.state[rank], sequence, when[action])
        if action.op in (Op.B, Op.BW):
            _extend(alive.dstate[rank], sequence, when[action])


def _extend(intervals: Intervals, key: Action, tick: int) -> None:
    first, last = intervals.get(key, (tick, tick))
    intervals[key] = (min(first, tick), max(last, tick))


def sequence_of(action: Action, schedule: Schedule) -> int:
    """The first slice of an action's sequence."""
    return action.microbatch - action.microbatch % schedule.slices


def colour(intervals: Iterable[tuple[Hashable, tuple[int, int]]]) -> dict[Hashable, int]:
    """The lowest free slot for each closed interval `(first, last)`, taken in order of start.

    >>> colour([("a", (0, 2)), ("b", (1, 3)), ("c", (3, 4))])
    {'a': 0, 'b': 1, 'c': 0}
    """
    slots: dict[Hashable, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (last tick, slot)
    for key, (first, last) in sorted(intervals, key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[key] = slot
        heapq.heappush(busy, (last, slot))
    return slots
