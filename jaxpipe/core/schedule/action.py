"""The types of a pipeline schedule: actions, the placement of stages, the order on each rank.

In this package "rank" is short for pipeline rank (`pp_rank`), a coordinate on the mesh axis pp.

Letters. This package writes B for the gradient of a stage's *input*, W for the gradient of its
*weights* and BW for both in one action (Qi et al., "Zero Bubble Pipeline Parallelism", section 2).
Labels such as `BW3@1` show op, microbatch and stage. Files use PyTorch's notation, `1B3`, where `I`
is our B, `W` our W and `B` our BW; it has no letter for R, the recomputation of a stage's
residuals ahead of B, and none for U, the optimizer update of a stage.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """Raised for an invalid schedule or request; the message names the rule and the position."""


class Op(enum.Enum):
    """The kinds of work: names appear in labels, values are the letters of PyTorch's notation."""

    F = "F"
    B = "I"
    W = "W"
    BW = "B"
    R = "R"
    U = "U"

    def __init__(self, letter: str):
        self._number = ord(letter)

    def __hash__(self) -> int:
        """The same in every process, unlike that of names: so sets have one order everywhere."""
        return self._number

    @property
    def computes_dx(self) -> bool:
        """Whether the op computes the gradient of a stage's input."""
        return self in (Op.B, Op.BW)

    @property
    def computes_dw(self) -> bool:
        """Whether the op computes the gradients of a stage's weights."""
        return self in (Op.W, Op.BW)


class Action(NamedTuple):
    """One op of one stage on one microbatch; a U has the last microbatch of the step it ends.

    >>> action = Action(Op.BW, stage=2, microbatch=5)
    >>> str(action), action.notation
    ('BW5@2', '2B5')
    """

    op: Op
    stage: int
    microbatch: int

    @property
    def notation(self) -> str:
        """The action in PyTorch's notation, for files."""
        return f"{self.stage}{self.op.value}{self.microbatch}"

    def __str__(self) -> str:
        return label(self)


class Cell(NamedTuple):
    """What one rank does in one tick: an F, a gradient action (B, W or BW), or both.

    `recompute` is an R, which runs after F and before the gradient action. `update` is the U of a
    stage whose weight gradients this cell's gradient action completes.

    >>> cell = Cell(Action(Op.F, 0, 7), Action(Op.BW, 3, 2))
    >>> str(cell), cell.notation
    ('F7@0+BW2@3', '(0F7;3B2)OVERLAP_F_B')
    """

    forward: Action | None = None
    gradient: Action | None = None
    update: Action | None = None
    recompute: Action | None = None

    def __hash__(self) -> int:
        """The same in every process: before Python 3.12 the hash of None is an address."""
        return hash(self.actions)

    @classmethod
    def from_action(cls, action: Action) -> "Cell":
        """Return a cell with one action, F, R or a gradient."""
        match action.op:
            case Op.F:
                return cls(forward=action)
            case Op.R:
                return cls(recompute=action)
            case _:
                return cls(gradient=action)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions present, in the order in which they run."""
        forward, gradient, update, recompute = self
        if update is not None or recompute is not None:
            every = (forward, recompute, gradient, update)
            return tuple(action for action in every if action is not None)
        if forward is None:
            return () if gradient is None else (gradient,)
        return (forward,) if gradient is None else (forward, gradient)

    @property
    def notation(self) -> str:
        """The cell in PyTorch's notation, for files."""
        text = ";".join(action.notation for action in self.actions)
        return f"({text})OVERLAP_F_B" if len(self.actions) == 2 else text

    def __str__(self) -> str:
        return label(*self.actions)


def label(*actions: Action, stages: bool = True) -> str:
    """Return the label of the actions of a cell: op, microbatch and, with `stages`, the stage.

    >>> label(Action(Op.F, 0, 7), Action(Op.BW, 0, 2), stages=False)
    'F7+BW2'
    """
    return "+".join(f"{op.name}{m}" + f"@{stage}" * stages for op, stage, m in actions)


@dataclass(frozen=True)
class Placement:
    """The rank of every stage.

    Stage `s` is on rank `rank_of[s]`. In a bidirectional placement the microbatches from
    `mirrored_from` on enter at the last rank: they find stage `s` on rank `pp - 1 - rank_of[s]`.
    """

    rank_of: tuple[int, ...]
    mirrored_from: int | None = None

    @classmethod
    def loop(cls, pp: int, virtual_stages: int = 1) -> "Placement":
        """Return the placement of stage `s` on rank `s mod pp`.

        >>> Placement.loop(2, virtual_stages=2).rank_of
        (0, 1, 0, 1)
        """
        return cls(tuple(s % pp for s in range(pp * virtual_stages)))

    @classmethod
    def v_shape(cls, pp: int) -> "Placement":
        """Return the V-shaped placement: stages `r` and `2 pp - 1 - r` on rank `r`.

        >>> Placement.v_shape(2).rank_of
        (0, 1, 1, 0)
        """
        return cls((*range(pp), *reversed(range(pp))))

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return max(self.rank_of) + 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def stored_chunks(self) -> int:
        """Largest number of stages whose parameters one rank stores."""
        return max(Counter(self.rank_of).values())

    @property
    def chunks(self) -> int:
        """Largest number of stages that one rank computes: 2 x `stored_chunks` if bidirectional."""
        return self.stored_chunks * (1 if self.mirrored_from is None else 2)

    def is_mirrored(self, microbatch: int) -> bool:
        """Return whether a microbatch enters at the last rank."""
        return self.mirrored_from is not None and microbatch >= self.mirrored_from

    def rank(self, stage: int, microbatch: int) -> int:
        """Return the rank that computes a stage for a microbatch."""
        rank = self.rank_of[stage]
        return self.pp - 1 - rank if self.is_mirrored(microbatch) else rank

    def chunk(self, stage: int, microbatch: int = 0) -> int:
        """Return the index of a stage on its rank: first unmirrored stages, then mirrored ones.

        >>> [Placement.v_shape(2).chunk(stage) for stage in range(4)]
        [0, 0, 1, 1]
        """
        index = self.rank_of[:stage].count(self.rank_of[stage])
        return index + self.stored_chunks if self.is_mirrored(microbatch) else index


@dataclass(frozen=True)
class Schedule:
    """The order of cells on every rank, without times; `simulate` and `lower` assign times.

    Attributes:
      name: name of the family or file.
      placement: the rank of every stage.
      microbatches: number of microbatches, over all fused steps; a sequence slice counts as one.
      ranks: the cells of every rank, in order.
      slices: sequence slices per sequence. `slices` consecutive microbatches form one sequence:
        each stage runs their F in this order, and their gradients in reverse.
      updates: number of fused optimizer steps, which share the microbatches evenly; every stage has
        a U after each. 0: a single step, whose update is not part of the schedule.
    """

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Cell, ...], ...]
    slices: int = 1
    updates: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once and of few numbers: caches of functions of a schedule ask for it.

        Schedules of the same sizes share it, and differ by their names or their first cells.
        """
        return hash((self.microbatches, self.updates, tuple(map(len, self.ranks))))

    @classmethod
    def from_orders(
        cls,
        name: str,
        placement: Placement,
        microbatches: int,
        orders: Iterable[Iterable[Action | Cell]],
        slices: int = 1,
    ) -> "Schedule":
        """Build a schedule from orders of cells; a lone action need not be wrapped in a cell."""
        ranks = (
            tuple(Cell.from_action(item) if isinstance(item, Action) else item for item in order)
            for order in orders
        )
        return cls(name, placement, microbatches, tuple(ranks), slices)

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.pp

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    @cached_property
    def recomputes(self) -> bool:
        """Whether residuals are recomputed by actions of their own (R), not by B."""
        return any(cell.recompute for order in self.ranks for cell in order)

    @cached_property
    def splits_gradients(self) -> bool:
        """Whether some gradient is B and W, and not BW."""
        return any(
            cell.gradient is not None and cell.gradient.op is Op.B
            for order in self.ranks
            for cell in order
        )

    @property
    def labels_stages(self) -> bool:
        """Whether labels name the stage, because a rank has several."""
        return self.stages > self.pp

    def notation(self) -> list[list[str]]:
        """Return the cells of every rank in PyTorch's notation, for example `['0F0', '0B0']`."""
        return [[cell.notation for cell in order] for order in self.ranks]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Yield every `(rank, action)`, rank by rank, in order."""
        for rank, order in enumerate(self.ranks):
            for cell in order:
                for action in cell.actions:
                    yield rank, action
