"""Live intervals of all stored values, and their slots by interval colouring.

A value occupies its slot from the tick in which it is written to the tick in which it is last read,
both included. Intervals are coloured greedily by start, which uses the fewest slots possible: the
largest number of values that are live at once.
"""

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from jaxpipe.core.schedule.action import Action, Op, Schedule
from jaxpipe.core.schedule.lanes import Message
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.placing import Grid

Interval = tuple[int, int]  # first and last tick
Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T", covariant=True)


class Buffers(NamedTuple, Generic[T]):
    """One item per ring buffer, such as its length or the intervals of its values.

    Attributes:
      inbox: y or dx, from its arrival until it is read.
      for_b: residuals, from F (or R, if there is one) to B or BW.
      for_w: residuals, from F (or R) to W or BW.
      for_r: what R recomputes them from, from F to R.
      stash: the W stash, from B to W; BW has none.
      head: inputs of the head's deferred weight gradients, from the loss to W of the last stage.
      embed: dx of stage 0 for the embedding's deferred gradient, from B to W.
      state: state that the slices of a sequence share in a stage, from the first F to the last B.
      dstate: gradient of `state`, from the first B to the last.
    """

    inbox: T
    for_b: T
    for_w: T
    for_r: T
    stash: T
    head: T
    embed: T
    state: T
    dstate: T


class SlotKey(NamedTuple):
    """The stage and microbatch whose activations a slot stores.

    The state that the slices of a sequence share is owned by the first slice.
    """

    stage: int
    microbatch: int


def action_key(action: Action) -> SlotKey:
    """Return the owner of the activations that an action writes or reads."""
    return SlotKey(action.stage, action.microbatch)


def sequence_key(action: Action | SlotKey, schedule: Schedule) -> SlotKey:
    """Return the owner of the state that the slices of an action's sequence share."""
    first = action.microbatch - action.microbatch % schedule.slices
    return SlotKey(action.stage, first)


def live_intervals(
    schedule: Schedule, grid: Grid, inputs: dict[Action, Message], lockstep: Lockstep
) -> list[Buffers[dict[Hashable, Interval]]]:
    """Return every rank's live intervals by buffer: in the inbox by reader, else by `SlotKey`."""
    when: dict[Op, dict[SlotKey, int]] = {op: {} for op in Op}  # ticks
    for tick, row in enumerate(grid):
        for cell in row:
            for op, stage, microbatch in cell.actions:
                when[op][SlotKey(stage, microbatch)] = tick
    intervals: list[Buffers[dict[Hashable, Interval]]] = [
        Buffers(*({} for _ in Buffers._fields)) for _ in range(schedule.pp)
    ]
    if schedule.slices > 1:
        _add_states(intervals, schedule, when)
    for action, message in inputs.items():
        if message.stored_tick is not None:
            intervals[message.receiver].inbox[action] = (message.stored_tick, message.read_tick)
    for key, start in when[Op.F].items():
        rank_intervals = intervals[schedule.placement.rank(*key)]
        if lockstep.vocab_parallel and key.stage == 0:
            rank_intervals.inbox[Action(Op.F, *key)] = (start, start)
        both, b, w = (when[op].get(key) for op in (Op.BW, Op.B, Op.W))
        if both is not None:
            b = w = both
        elif b is None or w is None:  # an order of forwards alone
            continue
        else:
            rank_intervals.stash[key] = (b, w)
        recomputed = when[Op.R].get(key)
        if recomputed is not None:
            rank_intervals.for_r[key] = (start, recomputed)
        computed = start if recomputed is None else recomputed
        rank_intervals.for_b[key] = (computed, b)
        rank_intervals.for_w[key] = (computed, w)
        if lockstep.defer_embed_head and key.stage == schedule.stages - 1:
            rank_intervals.head[key] = (start, w)
        if lockstep.defer_embed_head and key.stage == 0:
            rank_intervals.embed[key] = (b, w)
    return intervals


def _add_states(
    intervals: list[Buffers[dict[Hashable, Interval]]],
    schedule: Schedule,
    when: dict[Op, dict[SlotKey, int]],
) -> None:
    """Add the live intervals of the state that slices share, and of its gradient."""
    for op in (Op.F, Op.B, Op.BW):
        for key, tick in when[op].items():
            sequence = sequence_key(key, schedule)
            rank_intervals = intervals[schedule.placement.rank(*key)]
            _extend(rank_intervals.state, sequence, tick)
            if op is not Op.F:
                _extend(rank_intervals.dstate, sequence, tick)


def _extend(intervals: dict[Hashable, Interval], key: Hashable, tick: int) -> None:
    first, last = intervals.get(key, (tick, tick))
    intervals[key] = (min(first, tick), max(last, tick))


def assign_slots(intervals: Iterable[tuple[Key, Interval]]) -> dict[Key, int]:
    """Assign each closed interval `(first, last)` the lowest free slot, in order of start.

    >>> assign_slots([("a", (0, 2)), ("b", (1, 3)), ("c", (3, 4))])
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
