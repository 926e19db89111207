"""Times of the ops and cells of a schedule, and the memory that ops take and free."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.core.schedule.action import Action, Cell, Op


@dataclass(frozen=True)
class Costs:
    """Times of the ops, all in the same unit; the default is a backward of twice the forward.

    Attributes:
      F, B, W: time of an op, one number for all stages or a sequence with one per stage. BW takes
        B + W.
      transfer: time of one message between pipeline ranks.
      pair: time of an F and an unsplit BW that overlap in one cell; None: the sum of their times.
      exchange: the part of the ops' times, in the same unit, spent in collectives over mesh axes
        other than pp. In a cell with two stages, the collectives of one action overlap with the
        compute of the other.
      U: time of an optimizer update of a stage.
      R: time of a recomputation ahead of B, which B then does not take.
    """

    F: float | Sequence[float] = 1.0
    B: float | Sequence[float] = 1.0
    W: float | Sequence[float] = 1.0
    transfer: float = 0.0
    pair: float | None = None
    exchange: "Costs | None" = None
    U: float | Sequence[float] = 0.0
    R: float | Sequence[float] = 0.0

    def action_time(self, action: Action) -> float:
        """Return the time of one action."""

        def pick(cost: float | Sequence[float]) -> float:
            return cost if isinstance(cost, float | int) else cost[action.stage]

        match action.op:
            case Op.F:
                return pick(self.F)
            case Op.B:
                return pick(self.B)
            case Op.W:
                return pick(self.W)
            case Op.BW:
                return pick(self.B) + pick(self.W)
            case Op.U:
                return pick(self.U)
            case Op.R:
                return pick(self.R)

    def by_stage(self, op: Op, stages: int) -> tuple[float, ...]:
        """Return the time of an op on every stage.

        >>> Costs(F=(1.0, 2.0)).by_stage(Op.F, 2), Costs().by_stage(Op.W, 2)
        ((1.0, 2.0), (1.0, 1.0))
        """
        return tuple(self.action_time(Action(op, stage, 0)) for stage in range(stages))

    def cell_time(self, cell: Cell) -> float:
        """Return the time of a cell."""
        overlaps = cell.forward and cell.gradient and cell.gradient.op is Op.BW
        if self.pair is not None and overlaps:
            others = filter(None, (cell.update, cell.recompute))
            return self.pair + sum(map(self.action_time, others))
        return sum(map(self.action_time, cell.actions)) - self._hidden_time(cell)

    def _hidden_time(self, cell: Cell) -> float:
        """Return the time of collectives of one action that overlap with compute of the other.

        >>> costs = Costs(F=2.0, B=2.0, W=2.0, exchange=Costs(F=1.0, B=0.5, W=0.0))
        >>> forward = Action(Op.F, 0, 3)
        >>> [costs.cell_time(Cell(forward, Action(Op.BW, stage, 1))) for stage in (1, 0)]
        [4.5, 6.0]
        """
        forward, gradient, exchange = cell.forward, cell.gradient, self.exchange
        if not (exchange and forward and gradient) or forward.stage == gradient.stage:
            return 0.0
        (of_f, f), (of_g, g) = (
            (exchange.action_time(half), self.action_time(half) - exchange.action_time(half))
            for half in (forward, gradient)
        )
        return min(of_f, g) + min(of_g, f)


@dataclass(frozen=True)
class MemoryCosts:
    """Change of a rank's memory by each op of one stage and microbatch, in any one unit.

    F allocates, and B and W free (negative numbers). B is positive where its W stash is larger than
    the residuals that it frees. `state` is the size of the state that the slices of a sequence
    share in a stage, live from the first F to the last B; its gradient has the same size and is
    live from the first B to the last.
    """

    F: float = 1.0
    B: float = 0.0
    W: float = -1.0
    state: float = 0.0

    @property
    def b_growth(self) -> float:
        """Memory that must be free for a B to run."""
        return max(0.0, self.B)
