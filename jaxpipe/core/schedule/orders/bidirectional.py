"""DualPipe and DualPipeV: every rank computes two streams of microbatches and overlaps F with BW.

Source: DeepSeek-AI 2025, "DualPipe" (the eight steps of its `step`), and its "cut in half" V form.
Phase 0 is the stream that has passed fewer ranks when it reaches this rank, phase 1 the other.
Where an overlapped pair would wait, gradients are split so that W fills the gap. The bubble is
(P/2-1)(pair + BW - 3W) with P stages.
"""

from collections import deque
from collections.abc import Callable

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError


def dualpipe(pp: int, microbatches: int) -> Schedule:
    """Build DualPipe: microbatches enter at both ends, and rank r computes stages r and P-1-r.

    The first half of the microbatches goes down the ranks, the second half up.

    Raises `ScheduleError` unless P and M are even and M is at least 2P.
    """
    if pp % 2 or microbatches % 2 or microbatches < 2 * pp:
        legal = pp + pp % 2
        raise ScheduleError(
            f"dualpipe needs an even pp and an even number of microbatches, at least 2 pp: got "
            f"pp={pp}, microbatches={microbatches}; with pp={legal} use "
            f"{max(2 * legal, microbatches + microbatches % 2)}."
        )
    half = microbatches // 2
    placement = Placement(tuple(range(pp)), mirrored_from=half)
    orders = []
    for rank in range(pp):
        near_end = min(rank, pp - 1 - rank)

        def where(phase: int, index: int, rank: int = rank) -> tuple[int, int]:
            upward = phase ^ (rank >= pp // 2)
            return (pp - 1 - rank, half + index) if upward else (rank, index)

        middle = near_end == pp // 2 - 1
        orders.append(_build_order(pp // 2, near_end, half - pp + near_end + 1, middle, where))
    return Schedule.from_orders("dualpipe", placement, microbatches, orders)


def dualpipev(pp: int, microbatches: int) -> Schedule:
    """Build DualPipeV, on the V placement: rank r computes stages r and 2P-1-r.

    Raises `ScheduleError` for fewer than 2P microbatches.
    """
    if microbatches < 2 * pp:
        raise ScheduleError(
            f"dualpipev needs at least 2 pp microbatches: got pp={pp}, "
            f"microbatches={microbatches}; use {2 * pp} or more."
        )
    orders = []
    for rank in range(pp):

        def where(phase: int, index: int, rank: int = rank) -> tuple[int, int]:
            return (2 * pp - 1 - rank if phase else rank), index

        overlapped = microbatches - 2 * pp + rank + 1
        orders.append(_build_order(pp, rank, overlapped, rank == pp - 1, where))
    return Schedule.from_orders("dualpipev", Placement.v_shape(pp), microbatches, orders)


def _build_order(
    ranks: int,
    rank: int,
    overlapped: int,
    is_turning_rank: bool,
    where: Callable[[int, int], tuple[int, int]],
) -> list[Action | Cell]:
    """Return one rank's order.

    Args:
      ranks: ranks that one phase passes before the streams meet, P/2 (DualPipe) or P (DualPipeV).
      rank: distance of this rank from the nearer end (DualPipe), or its number (DualPipeV).
      overlapped: length of step 4, in rounds of two pairs.
      is_turning_rank: whether the two phases meet on this rank; the first pair of step 4 is then
        two cells.
      where: `(phase, i)` to the stage and microbatch of the i-th action of a phase.
    """
    order: list[Action | Cell] = []
    counts = {(op, phase): 0 for op in "FB" for phase in (0, 1)}
    pending: deque[Action] = deque()
    beyond = ranks - rank - 1

    def act(op: Op, phase: int) -> Action:
        kind = "F" if op is Op.F else "B"
        stage, m = where(phase, counts[kind, phase])
        counts[kind, phase] += 1
        action = Action(op, stage, m)
        if op is Op.B:
            pending.append(action._replace(op=Op.W))
        return action

    def pair(forward_phase: int, gradient_phase: int) -> Cell:
        return Cell(act(Op.F, forward_phase), act(Op.BW, gradient_phase))

    for _ in range(2 * beyond):  # 1: F0
        order.append(act(Op.F, 0))
    for _ in range(rank + 1):  # 2: F0 F1
        order += [act(Op.F, 0), act(Op.F, 1)]
    for _ in range(beyond):  # 3: B1 W1 F1
        order += [act(Op.B, 1), pending.popleft(), act(Op.F, 1)]
    for i in range(overlapped):  # 4: F0 with BW1, F1 with BW0
        order += [act(Op.F, 0), act(Op.BW, 1)] if is_turning_rank and i == 0 else [pair(0, 1)]
        order.append(pair(1, 0))
    for _ in range(beyond):  # 5: BW1, F1 with BW0
        order += [act(Op.BW, 1), pair(1, 0)]
    split = False
    for i in range(rank + 1):  # 6: gradients of both phases, the second half of them split
        split |= i == (rank + 1) // 2 and rank % 2 == 1
        order.append(act(Op.B if split else Op.BW, 1))
        split |= i == (rank + 1) // 2 and rank % 2 == 0
        order.append(act(Op.B if split else Op.BW, 0))
    for _ in range(beyond):  # 7: W, B0
        order += [pending.popleft(), act(Op.B, 0)]
    return order + list(pending)  # 8: W
