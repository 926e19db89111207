"""What a pipeline schedule is made of: actions, where stages live, and the order on each rank.

Letters. This package writes B for the gradient of a stage's *input*, W for the gradient of its
*weights* and BW for both in one action (Qi et al., "Zero Bubble Pipeline Parallelism", section 2).
People read labels, such as `BW3@1`: op, microbatch and stage. Files have PyTorch's notation, `1B3`,
where `I` is our B, `W` our W and `B` our BW; it has no letter for U, the update of a stage.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule, or the request for one, breaks a rule; the message names rule and place."""


class Op(enum.Enum):
    """The kinds of work; each name is that of labels, each value the letter of the notation."""

    F = "F"
    B = "I"
    W = "W"
    BW = "B"
    U = "U"

    __hash__ = object.__hash__  # there is one of each; enum's own is slow, and actions are keys

    @property
    def gives_dx(self) -> bool:
        """Whether it makes the gradient of a stage's input."""
        return self in (Op.B, Op.BW)

    @property
    def gives_dw(self) -> bool:
        """Whether it makes the gradients of a stage's weights."""
        return self in (Op.W, Op.BW)


class Action(NamedTuple):
    """One op of one stage on one microbatch; of U it is the last of the step that it ends.

    >>> action = Action(Op.BW, stage=2, microbatch=5)
    >>> str(action), action.notation
    ('BW5@2', '2B5')
    """

    op: Op
    stage: int
    microbatch: int

    @property
    def notation(self) -> str:
        """PyTorch's text of it, for files."""
        return f"{self.stage}{self.op.value}{self.microbatch}"

    def __str__(self) -> str:
        return label(self)


class Value(NamedTuple):
    """What an action leaves behind for others: `y` of a stage, or `dx`, its input's gradient."""

    kind: str
    stage: int
    microbatch: int


class Cell(NamedTuple):
    """An F, a gradient action (B, W or BW), or both at once; what one rank does in one tick.

    `update` is the U of the stage whose gradients this cell's makes whole.

    >>> cell = Cell(Action(Op.F, 0, 7), Action(Op.BW, 3, 2))
    >>> str(cell), cell.notation
    ('F7@0+BW2@3', '(0F7;3B2)OVERLAP_F_B')
    """

    forward: Action | None = None
    gradient: Action | None = None
    update: Action | None = None

    @classmethod
    def of(cls, action: Action) -> "Cell":
        """The cell of one action."""
        return cls(forward=action) if action.op is Op.F else cls(gradient=action)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions present, F first."""
        forward, gradient, update = self
        if update is not None:
            return tuple(action for action in self if action is not None)
        if forward is None:
            return () if gradient is None else (gradient,)
        return (forward,) if gradient is None else (forward, gradient)

    @property
    def notation(self) -> str:
        """PyTorch's text of it, for files."""
        text = ";".join(action.notation for action in self.actions)
        return f"({text})OVERLAP_F_B" if len(self.actions) == 2 else text

    def __str__(self) -> str:
        return label(*self.actions)


def label(*actions: Action, stages: bool = True) -> str:
    """What people read of actions in one cell: op, microbatch and, unless a rank has one, stage.

    >>> label(Action(Op.F, 0, 7), Action(Op.BW, 0, 2), stages=False)
    'F7+BW2'
    """
    return "+".join(f"{op.name}{m}" + f"@{stage}" * stages for op, stage, m in actions)


@dataclass(frozen=True)
class Placement:
    """Where the stages live.

    Stage `s` is on rank `rank_of[s]`. In a bidirectional placement the microbatches from
    `mirrored_from` on enter at the last rank: for them it is on rank `pp - 1 - rank_of[s]`.
    """

    rank_of: tuple[int, ...]
    mirrored_from: int | None = None

    @classmethod
    def loop(cls, pp: int, virtual_stages: int = 1) -> "Placement":
        """Stage `s` on rank `s mod pp`.

        >>> Placement.loop(2, virtual_stages=2).rank_of
        (0, 1, 0, 1)
        """
        return cls(tuple(s % pp for s in range(pp * virtual_stages)))

    @classmethod
    def v_shape(cls, pp: int) -> "Placement":
        """Down the ranks and up again: stages `r` and `2 pp - 1 - r` on rank `r`.

        >>> Placement.v_shape(2).rank_of
        (0, 1, 1, 0)
        """
        return cls((*range(pp), *reversed(range(pp))))

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def own_chunks(self) -> int:
        """Most stages that a rank owns, whose parameters it holds."""
        return max(Counter(self.rank_of).values())

    @property
    def chunks(self) -> int:
        """Most stages that a rank computes: twice its own where microbatches enter at both ends."""
        return self.own_chunks * (1 if self.mirrored_from is None else 2)

    def mirrored(self, microbatch: int) -> bool:
        """Whether a microbatch enters at the last rank."""
        return self.mirrored_from is not None and microbatch >= self.mirrored_from

    def rank(self, stage: int, microbatch: int) -> int:
        """The rank that computes a stage of a microbatch."""
        rank = self.rank_of[stage]
        return self.pp - 1 - rank if self.mirrored(microbatch) else rank

    def chunk(self, stage: int, microbatch: int = 0) -> int:
        """Which of the stages of its rank: its own in order, then those it computes mirrored.

        >>> [Placement.v_shape(2).chunk(stage) for stage in range(4)]
        [0, 0, 1, 1]
        """
        own = self.rank_of[:stage].count(self.rank_of[stage])
        return own + self.own_chunks if self.mirrored(microbatch) else own


@dataclass(frozen=True)
class Schedule:
    """The order of cells on every rank; times are decided later, by `simulate` or `lower`.

    Where sequences are cut into `slices` in time, every slice counts as a microbatch, and so many
    in a row are one sequence. Each stage runs their F in this order, their gradients in reverse.

    With `updates` the microbatches are those of so many steps in turn, and every stage has a U
    after each; 0: one step, whose update stands outside.
    """

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Cell, ...], ...]
    slices: int = 1
    updates: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        placement: Placement,
        microbatches: int,
        orders: Iterable[Iterable[Action | Cell]],
        slices: int = 1,
    ) -> "Schedule":
        """From orders in which actions that stand alone need no cell around them."""
        ranks = (
            tuple(Cell.of(item) if isinstance(item, Action) else item for item in order)
            for order in orders
        )
        return cls(name, placement, microbatches, tuple(ranks), slices)

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return self.placement.pp

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    @property
    def labels_stages(self) -> bool:
        """Whether labels name stages: a rank holds several of them."""
        return self.stages > self.pp

    def orders(self) -> list[list[str]]:
        """Per rank, the cells in PyTorch's notation, for example `['0F0', '0B0']`."""
        return [[cell.notation for cell in order] for order in self.ranks]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """All `(rank, action)`, rank by rank, in order."""
        for rank, order in enumerate(self.ranks):
            for cell in order:
                for action in cell.actions:
                    yield rank, action


def produced_by(action: Action) -> Value | None:
    """The value another action may wait for; W and U leave none."""
    match action.op:
        case Op.F:
            return Value("y", action.stage, action.microbatch)
        case Op.B | Op.BW:
            return Value("dx", action.stage, action.microbatch)
        case Op.W | Op.U:
            return None


def hop_between(kind: str, sender: int, receiver: int, pp: int) -> int | None:
    """+1 or -1, the way round the ring of a y or dx; None where the two are no neighbours.

    Where both ways lead there (two ranks), y goes up and dx goes down.
    """
    ways = [hop for hop in (+1, -1) if (sender + hop) % pp == receiver]
    if len(ways) == 2:
        return +1 if kind == "y" else -1
    return ways[0] if ways else None


def link_of(action: Action, placement: Placement) -> int | None:
    """The rank r if what an action makes travels between r and the next; None where it stays."""
    value = produced_by(action)
    to = action.stage + (1 if action.op is Op.F else -1)
    if value is None or not 0 <= to < placement.stages:
        return None
    sender, receiver = (placement.rank(s, action.microbatch) for s in (action.stage, to))
    hop = hop_between(value.kind, sender, receiver, placement.pp)
    return None if sender == receiver else sender if hop == 1 else receiver


def needed_by(action: Action, stages: int) -> list[Value]:
    """The values an action waits for.

    F waits for the stage before; B and BW for their own F and for the stage after (the last
    stage's output gradient comes with its own F); W for its own B; U for nothing, since it stands
    behind all gradients of its stage.
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
        case Op.U:
            return []


def external_needs(cell: Cell, stages: int) -> list[Value]:
    """The values a cell waits for: those of its actions, less what its own F makes."""
    own = produced_by(cell.forward) if cell.forward else None
    needs = (value for action in cell.actions for value in needed_by(action, stages))
    return [value for value in needs if value != own]
