"""Schedules on the V placement: rank r holds stages r and 2P-1-r, so the loss is on rank 0.

Each keeps a memory of its own, unless another limit is asked for:

| schedule | held on a rank until W, in stages of a microbatch | bubble for F = B = W, M large |
|---|---|---|
| zbv | 2P: as much as 1F1B | none, per rank |
| v_half | P + 2: about half | about half of 1F1B's |
| v_min | 2 floor((P + 4) / 3): about a third | about two thirds of 1F1B's |

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 and 4; the order
of `zbv` at equal costs is that of PyTorch's `ScheduleZBVZeroBubble`.
"""

from collections.abc import Callable

from jaxpipe.schedule.action import Action, Op, Placement, Schedule
from jaxpipe.schedule.problem import ANY_TARGET, Problem, Target, limit_in_units
from jaxpipe.schedule.search import search

_HELD: dict[str, Callable[[int], int]] = {
    "zbv": lambda pp: 2 * pp,
    "v_half": lambda pp: pp + 2,
    "v_min": lambda pp: 2 * ((pp + 4) // 3),
}


def v_shaped(name: str, pp: int, microbatches: int, target: Target = ANY_TARGET) -> Schedule:
    """`zbv`, `v_half` or `v_min` for any costs, found by the search within their memory.

    Without a limit in the target it is that of the table above, in stages of a microbatch from F to
    B; or what one microbatch takes by itself, where that is more.
    """
    memory, placement = target.memory, Placement.v_shape(pp)
    if target.memory_limit is None:
        limit = max(_HELD[name](pp) * memory.F, 2 * memory.F + memory.growth)
    else:
        limit = limit_in_units(target.memory_limit, placement, memory)
    problem = Problem(name, placement, microbatches, limit, target)
    known = [zbv_order(pp, microbatches)] if name == "zbv" else []
    within_a_second = max(80_000, 350_000 - 12 * problem.steps)
    return search(problem, effort=target.effort or within_a_second, known=known)


def zbv_order(pp: int, microbatches: int) -> Schedule:
    """Zero bubble at 1F1B's memory where F, B and W cost the same, in six phases.

    >>> print("\\n".join(" ".join(order) for order in zbv_order(2, 3).orders()))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    full = max(microbatches, 2 * pp - 1)  # the phases need as many; those beyond M are left out
    orders = [
        [action for action in _six_phases(pp, rank, full) if action.microbatch < microbatches]
        for rank in range(pp)
    ]
    return Schedule.of("zbv", Placement.v_shape(pp), microbatches, orders)


def _six_phases(pp: int, rank: int, microbatches: int) -> list[Action]:
    stages = (rank, 2 * pp - 1 - rank)
    done = {(op, chunk): 0 for op in (Op.F, Op.B, Op.W) for chunk in (0, 1)}
    order: list[Action] = []

    def act(op: Op, chunk: int) -> None:
        if done[op, chunk] < (microbatches if op is not Op.W else done[Op.B, chunk]):
            order.append(Action(op, stages[chunk], done[op, chunk]))
            done[op, chunk] += 1

    def gradient(chunk: int) -> None:
        act(Op.B, chunk)
        act(Op.W, chunk)

    for _ in range(2 * (pp - rank) - 1):  # 1: down
        act(Op.F, 0)
    for _ in range(rank):  # 2: down and up
        act(Op.F, 1)
        act(Op.F, 0)
    for _ in range(pp - rank):  # 3: the first gradients
        act(Op.F, 1)
        gradient(1)
    while done[Op.F, 1] < microbatches:  # 4: steady
        act(Op.F, 0)
        gradient(0)
        act(Op.F, 1)
        gradient(1)
    for _ in range(rank):  # 5: gradients of inputs alone
        act(Op.B, 0)
        act(Op.B, 1)
    for _ in range(pp - rank):  # 6: with the weights' behind
        gradient(0)
    for chunk in (1, 0):
        while done[Op.W, chunk] < microbatches:
            act(Op.W, chunk)
    return order
