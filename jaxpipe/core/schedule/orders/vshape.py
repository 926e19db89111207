"""Orders on the V placement: rank r has stages r and 2P-1-r, so the loss is on rank 0.

`zbv` has no bubble per rank for F = B = W at 1F1B's memory; `1f1b_v` splits no gradient, and has
five sixths of 1F1B's bubble or less at two thirds of its memory. Source: Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory", sections 3 and 4; the order of `zbv` is that of PyTorch's
`ScheduleZBVZeroBubble`. `jaxpipe.schedules.search.vshape` searches orders for other costs.
"""

import numpy as np

from jaxpipe.core.schedule.action import Action, Op, Placement, Schedule
from jaxpipe.core.schedule.values import Value, needed_values, produced_value


def zbv_order(pp: int, microbatches: int) -> Schedule:
    """Build the zero-bubble V schedule for F = B = W at 1F1B's memory, in six phases.

    >>> print("\\n".join(" ".join(order) for order in zbv_order(2, 3).notation()))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    full = max(microbatches, 2 * pp - 1)  # the phases need 2P - 1; those beyond M are dropped
    orders = [
        [action for action in _build_zbv_order(pp, rank, full) if action.microbatch < microbatches]
        for rank in range(pp)
    ]
    return Schedule.from_orders("zbv", Placement.v_shape(pp), microbatches, orders)


def _build_zbv_order(pp: int, rank: int, microbatches: int) -> list[Action]:
    stages = (rank, 2 * pp - 1 - rank)
    counts = {(op, chunk): 0 for op in (Op.F, Op.B, Op.W) for chunk in (0, 1)}
    order: list[Action] = []

    def act(op: Op, chunk: int) -> None:
        if counts[op, chunk] < (microbatches if op is not Op.W else counts[Op.B, chunk]):
            order.append(Action(op, stages[chunk], counts[op, chunk]))
            counts[op, chunk] += 1

    def gradient(chunk: int) -> None:
        act(Op.B, chunk)
        act(Op.W, chunk)

    for _ in range(2 * (pp - rank) - 1):  # 1: forwards down the ranks
        act(Op.F, 0)
    for _ in range(rank):  # 2: forwards down and up
        act(Op.F, 1)
        act(Op.F, 0)
    for _ in range(pp - rank):  # 3: the first gradients
        act(Op.F, 1)
        gradient(1)
    while counts[Op.F, 1] < microbatches:  # 4: steady
        act(Op.F, 0)
        gradient(0)
        act(Op.F, 1)
        gradient(1)
    for _ in range(rank):  # 5: B alone
        act(Op.B, 0)
        act(Op.B, 1)
    for _ in range(pp - rank):  # 6: B, each followed by a W
        gradient(0)
    for chunk in (1, 0):
        while counts[Op.W, chunk] < microbatches:
            act(Op.W, chunk)
    return order


_PERIOD = 6  # ticks of a rank's two F and two BW of one microbatch
_TICKS = {Op.F: 1, Op.BW: 2}


def one_f_one_b_v(pp: int, microbatches: int) -> Schedule:
    """Build 1F1B on the V in two thirds of 1F1B's memory, by repeating a building block.

    With F = 1 and BW = 2 every op is then moved to the earliest idle ticks of its rank that come
    after its inputs and do not raise the rank's peak memory. For P - 1 a multiple of 3 this leaves
    5/6 of 1F1B's bubble.

    >>> print("\\n".join(" ".join(order) for order in one_f_one_b_v(2, 2).notation()))
    0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    placement = Placement.v_shape(pp)
    block = _build_block(placement).items()
    planned = [(t + _PERIOD * m, Action(*at, m)) for at, t in block for m in range(microbatches)]
    planned.sort(key=lambda item: item[0])
    lines = [_RankTimeline(planned[-1][0] + 3) for _ in range(pp)]
    for tick, action in planned:
        lines[placement.rank_of[action.stage]].put(tick, action.op)
    most = max(line.live.max() for line in lines)
    ends: dict[Value | None, int] = {}  # no entry is None: nothing here is an update
    orders: list[list[tuple[int, Action]]] = [[] for _ in lines]
    for tick, action in planned:
        ready = max((ends[value] for value in needed_values(action, placement.stages)), default=0)
        rank = placement.rank_of[action.stage]
        begin = lines[rank].move(tick, action.op, ready, most)
        ends[produced_value(action)] = begin + _TICKS[action.op]
        orders[rank].append((begin, action))
    in_order = [[a for _, a in sorted(order, key=lambda item: item[0])] for order in orders]
    return Schedule.from_orders("1f1b_v", placement, microbatches, in_order)


def _build_block(placement: Placement) -> dict[tuple[Op, int], int]:
    """Return the ticks of microbatch 0, which do not collide when repeated every 6 ticks.

    F goes down the ranks and up again without a pause. BW of a stage takes the first two
    consecutive ticks that are free of both F of its rank, and that leave two consecutive ticks to
    the rank's other BW.
    """
    begins = {(Op.F, stage): stage for stage in range(placement.stages)}
    free = [set(range(_PERIOD)) for _ in range(placement.pp)]
    for stage, rank in enumerate(placement.rank_of):
        free[rank].discard(stage % _PERIOD)
    tick = placement.stages
    pairs = [{t, (t + 1) % _PERIOD} for t in range(_PERIOD)]
    for stage in reversed(range(placement.stages)):
        ticks = free[placement.rank_of[stage]]
        while not any(
            pairs[tick % _PERIOD] <= ticks <= pairs[tick % _PERIOD] | two for two in pairs
        ):
            tick += 1
        ticks -= pairs[tick % _PERIOD]
        begins[Op.BW, stage] = tick
        tick += _TICKS[Op.BW]
    return begins


class _RankTimeline:
    """The ticks of one rank: whether each is busy, and the (microbatch, stage) pairs live in it."""

    def __init__(self, ticks: int):
        self.busy = np.zeros(ticks, bool)
        self.live = np.zeros(ticks, int)

    def put(self, tick: int, op: Op) -> None:
        """Place an op that starts in a tick."""
        end = tick + _TICKS[op]
        self.busy[tick:end] = True
        self.live[tick if op is Op.F else end :] += 1 if op is Op.F else -1

    def move(self, tick: int, op: Op, ready: int, most: int) -> int:
        """Move an op to its earliest possible tick, at most `tick`, and return that tick.

        Args:
          tick: where the op starts now.
          op: F or BW.
          ready: first tick in which its inputs are available.
          most: limit on live (microbatch, stage) pairs.
        """
        ticks = _TICKS[op]
        self.busy[tick : tick + ticks] = False
        idle = (t for t in range(ready, tick) if not self.busy[t : t + ticks].any())
        fitting = (t for t in idle if op is Op.BW or self.live[t:tick].max() < most)
        begin = next(fitting, tick)
        self.busy[begin : begin + ticks] = True
        if op is Op.F:
            self.live[begin:tick] += 1
        else:
            self.live[begin + ticks : tick + ticks] -= 1
        return begin
