"""The order of an evaluation: forwards only."""

from heapq import heappop, heappush

from jaxpipe.core.schedule.action import Action, Op, Placement, Schedule


def forward_only(placement: Placement, microbatches: int, slices: int = 1) -> Schedule:
    """Build a schedule of forwards only, for evaluation.

    Every rank runs the latest stage that is ready, so that few messages are queued. As in
    `Schedule`, `slices` consecutive microbatches are one sequence.

    >>> forward_only(Placement.loop(2), 2).notation()
    [['0F0', '0F1'], ['1F0', '1F1']]
    """
    orders: list[list[Action]] = [[] for _ in range(placement.pp)]
    ready: list[list[tuple[int, int]]] = [[] for _ in orders]  # heaps of (-stage, microbatch)
    for m in range(microbatches):
        heappush(ready[placement.rank(0, m)], (0, m))
    while any(ready):
        used = [heappop(heap) if heap else None for heap in ready]
        for order, item in zip(orders, used):
            if item is not None:
                stage, m = -item[0], item[1]
                order.append(Action(Op.F, stage, m))
                if stage + 1 < placement.stages:
                    heappush(ready[placement.rank(stage + 1, m)], (-stage - 1, m))
    return Schedule.from_orders("forward_only", placement, microbatches, orders, slices)
