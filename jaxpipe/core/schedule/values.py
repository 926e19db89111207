"""The values that actions compute and wait for, and the ranks between which they travel."""

from functools import cache
from typing import NamedTuple

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement


class Value(NamedTuple):
    """The result of an action that others read: a stage's output `y` or input gradient `dx`."""

    kind: str
    stage: int
    microbatch: int


def produced_value(action: Action) -> Value | None:
    """Return the value of an action that other stages or W may read; None for W, R and U."""
    match action.op:
        case Op.F:
            return Value("y", action.stage, action.microbatch)
        case Op.B | Op.BW:
            return Value("dx", action.stage, action.microbatch)
        case Op.W | Op.R | Op.U:
            return None


@cache  # of few kinds and ranks, but asked for every message
def permute_direction(kind: str, sender: int, receiver: int, pp: int) -> int | None:
    """Return +1 or -1, the permute direction of a y or dx; None where the ranks are not neighbours.

    Ranks are a ring: the last one neighbours the first. With two ranks both directions lead to the
    receiver; y then takes +1 and dx takes -1.
    """
    hops = [hop for hop in (+1, -1) if (sender + hop) % pp == receiver]
    if len(hops) == 2:
        return +1 if kind == "y" else -1
    return hops[0] if hops else None


def permute_pair(action: Action, placement: Placement) -> int | None:
    """Return r if the value of an action travels between ranks r and r + 1; None if it stays."""
    value = produced_value(action)
    to = action.stage + (1 if action.op is Op.F else -1)
    if value is None or not 0 <= to < placement.stages:
        return None
    sender, receiver = (placement.rank(s, action.microbatch) for s in (action.stage, to))
    hop = permute_direction(value.kind, sender, receiver, placement.pp)
    return None if sender == receiver else sender if hop == 1 else receiver


def needed_values(action: Action, stages: int) -> list[Value]:
    """Return the values that an action waits for.

    F waits for the y of the previous stage. B and BW wait for the F of the same stage and
    microbatch and for the dx of the next stage (the last stage computes its output gradient from
    its F). W waits for its B. R and U wait for no value: the order of their rank puts R between the
    F and the B or BW whose residuals it computes, and U after all gradients of its stage.
    """
    _, stage, microbatch = action
    match action.op:
        case Op.F:
            return [Value("y", stage - 1, microbatch)] if stage else []
        case Op.B | Op.BW:
            forward = [Value("y", stage, microbatch)]
            last = stage == stages - 1
            return forward if last else [*forward, Value("dx", stage + 1, microbatch)]
        case Op.W:
            return [Value("dx", stage, microbatch)]
        case Op.R | Op.U:
            return []


def external_values(cell: Cell, stages: int) -> list[Value]:
    """Return the values that a cell waits for, without the y that the cell's F computes."""
    computed = produced_value(cell.forward) if cell.forward else None
    needed = (value for action in cell.actions for value in needed_values(action, stages))
    return [value for value in needed if value != computed]
