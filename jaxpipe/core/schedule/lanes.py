"""The messages of a schedule: sender, receiver and ticks of every value, and its permute.

A tick has one permute in each direction, so a value travels to a neighbouring rank or stays. The
permute pairs ("routes") are only those between which some tick sends. The last and the first rank
thus do not wait for each other unless consecutive stages are on them.
A permute has one lane per message that a rank may send in one tick: a y, a dx, or one of each where
a cell computes both for the same neighbour (V-shaped and bidirectional placements).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.placing import Grid
from jaxpipe.core.schedule.topological_order import cell_kinds
from jaxpipe.core.schedule.values import Value, permute_direction, produced_value


class Message(NamedTuple):
    """A value, the rank that computes it and the rank that reads it.

    `computed_tick`, `stored_tick` and `read_tick` are the ticks in which it is computed, written to
    the inbox and read. If sender and receiver are the same rank, it is not sent. A value that is
    read in the cell that computes it (the last stage's y, which the head replaces by its gradient)
    is never stored: `stored_tick` is None.
    """

    value: Value
    sender: int
    receiver: int
    computed_tick: int
    stored_tick: int | None
    read_tick: int


PermutePair = tuple[int, int]  # ranks: sender, receiver
PermutePairs = Mapping[int, tuple[PermutePair, ...]]  # by hop


class Lane(NamedTuple):
    """One message per rank and tick to the rank at distance `hop`; its kinds are y, dx or both."""

    hop: int
    kinds: tuple[str, ...]


def list_messages(schedule: Schedule, grid: Grid, transfer_ticks: int) -> dict[Action, Message]:
    """Return the message that each action reads, without actions that read none."""
    computed = {
        value: (rank, tick)
        for tick, row in enumerate(grid)
        for rank, cell in enumerate(row)
        for value in filter(None, map(produced_value, cell.actions))
    }
    messages = {}
    for tick, row in enumerate(grid):
        for rank, cell in enumerate(row):
            for action in cell.actions:
                value = _received_value(action, schedule.stages)
                if value is None:
                    continue
                sender, when = computed[value]
                stored = when + (1 if sender == rank else transfer_ticks)
                in_cell = (sender, when) == (rank, tick)
                messages[action] = Message(
                    value, sender, rank, when, None if in_cell else stored, tick
                )
    return messages


def _received_value(action: Action, stages: int) -> Value | None:
    """Return the value that an action reads from another stage, or from the head."""
    op, stage, m = action
    if op is Op.F:
        return Value("y", stage - 1, m) if stage else None
    if op in (Op.W, Op.R, Op.U):
        return None
    return Value("y", stage, m) if stage == stages - 1 else Value("dx", stage + 1, m)


def sent_messages(schedule: Schedule, cells: Iterable[Cell]) -> list[Message]:
    """Return the messages of cells to other ranks, with the number of a cell as its tick."""
    messages = []
    for number, cell in enumerate(cells):
        for action in cell.actions:
            value = produced_value(action)
            reader = action.stage + (1 if action.op is Op.F else -1)
            if value is None or not 0 <= reader < schedule.stages:
                continue
            sender, receiver = (
                schedule.placement.rank(stage, action.microbatch)
                for stage in (action.stage, reader)
            )
            if sender != receiver:
                messages.append(Message(value, sender, receiver, number, None, number))
    return messages


def assign_lanes(schedule: Schedule, sent: list[Message]) -> tuple[Lane, ...]:
    """Return the fewest lanes that carry all messages between ranks, at most two per direction.

    Raises `ScheduleError` for a message to a rank that is not next on the ring.
    """
    together: Counter[tuple[int, int, int]] = Counter()  # messages of a cell: one y, one dx or both
    kinds = set()
    for message in sent:
        if message.sender != message.receiver:
            hop = message_direction(message, schedule)
            kinds.add((hop, message.value.kind))
            together[hop, message.computed_tick, message.sender] += 1
    crowded = {hop for (hop, _, _), count in together.items() if count == 2}
    lanes: list[Lane] = []
    for hop in sorted({hop for hop, _ in kinds}, reverse=True):
        every = tuple(kind for kind in ("y", "dx") if (hop, kind) in kinds)
        lanes += [Lane(hop, (kind,)) for kind in every] if hop in crowded else [Lane(hop, every)]
    return tuple(lanes)


@lru_cache(maxsize=32)  # a schedule is tried with several locksteps; a plan has about two dozen
def list_permute_pairs(schedule: Schedule, phases: int = 1) -> tuple[PermutePairs, ...]:
    """Return the permute pairs that the schedule uses, sorted, by phase and hop.

    The pairs of ranks r and r + 1 are in phase r modulo `phases`.

    Raises `ScheduleError` for a message to a rank that is not next on the ring, and for phased
    permutes where ranks have several stages.
    """
    if phases > 1 and schedule.placement != Placement.loop(schedule.pp):
        raise ScheduleError(
            f"phases={phases}: in a phase a rank has one neighbour to exchange with, but ranks of "
            f"{schedule.name} have several stages: only with one stage a rank."
        )
    pairs_by_hop: dict[int, set[PermutePair]] = defaultdict(set)
    for message in sent_messages(schedule, cell_kinds(schedule)[1]):
        pairs_by_hop[message_direction(message, schedule)].add((message.sender, message.receiver))
    return tuple(
        {
            hop: tuple(
                (sender, receiver)
                for sender, receiver in sorted(routes)
                if (sender if hop == 1 else receiver) % phases == phase
            )
            for hop, routes in pairs_by_hop.items()
        }
        for phase in range(phases)
    )


def message_direction(message: Message, schedule: Schedule) -> int:
    """Return the permute direction of a message, +1 or -1, by `permute_direction`.

    Raises `ScheduleError` where sender and receiver are not neighbours.
    """
    kind, stage, m = message.value
    hop = permute_direction(kind, message.sender, message.receiver, schedule.pp)
    if hop is None:
        raise ScheduleError(
            f"{schedule.name}: {kind} of stage {stage}, microbatch {m} goes from rank "
            f"{message.sender} to rank {message.receiver}: stages that follow each other must be "
            f"on the same or on neighbouring ranks; place them so."
        )
    return hop
