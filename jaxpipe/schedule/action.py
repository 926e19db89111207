"""What a pipeline schedule is made of: actions, where stages live, and the order on each rank.

Letters. This package writes B for the gradient of a stage's *input*, W for the gradient of its
*weights* and BW for both in one action (Qi et al., "Zero Bubble Pipeline Parallelism", section 2).
The text notation of an order is PyTorch's, where `I` is our B, `W` our W and `B` our BW.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule, or the request for one, breaks a rule; the message names rule and place."""


class Op(enum.Enum):
    """The kinds of work; each value is the letter used in the text notation of an order."""

    F = "F"
    B = "I"
    W = "W"
    BW = "B"


class Action(NamedTuple):
    """One op of one stage on one microbatch.

    >>> str(Action(Op.BW, 2, 5))
    '2B5'
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


class Value(NamedTuple):
    """What an action leaves behind for others: `y` of a stage, or `dx`, its input's gradient."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Placement:
    """Where the stages live: `rank_of[s]` is the rank that computes stage `s`."""

    rank_of: tuple[int, ...]

    @classmethod
    def loop(cls, pp: int, virtual_stages: int = 1) -> "Placement":
        """Stage `s` on rank `s mod pp`.

        >>> Placement.loop(2, virtual_stages=2).rank_of
        (0, 1, 0, 1)
        """
        return cls(tuple(s % pp for s in range(pp * virtual_stages)))

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank; times are decided later, by `simulate` or `lower`."""

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return self.placement.pp

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    def orders(self) -> list[list[str]]:
        """Per rank, the actions in text notation, for example `['0F0', '0B0']`."""
        return [[str(action) for action in order] for order in self.ranks]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """All `(rank, action)`, rank by rank, in order."""
        for rank, order in enumerate(self.ranks):
            for action in order:
                yield rank, action


def produced_by(action: Action) -> Value | None:
    """The value another action may wait for; W leaves none."""
    match action.op:
        case Op.F:
            return Value("y", action.stage, action.microbatch)
        case Op.B | Op.BW:
            return Value("dx", action.stage, action.microbatch)
        case Op.W:
            return None


def needed_by(action: Action, stages: int) -> list[Value]:
    """The values an action waits for.

    F waits for the stage before; B and BW for their own F and for the stage after (the last
    stage's output gradient comes with its own F); W for its own B.
    """
    _, stage, microbatch = action
    match action.op:
        case Op.F:
            return [Value("y", stage - 1, microbatch)] if stage else []
        case Op.B | Op.BW:
            own = [Value("y", stage, microbatch)]
            last = stage == stages - 1
            return own if last else [*own, Value("dx", stage + 1, microbatch)]
        case Op.W:
            return [Value("dx", stage, microbatch)]
