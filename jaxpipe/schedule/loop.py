"""Schedules on the loop placement: stage s on rank s mod P, in v rounds.

Two families. Breadth-first runs a group of microbatches through all stages, then back. The
alternating family warms up with forwards, then alternates one forward with one gradient, then
drains; its members differ in how long they warm up and in how far W trails B:

| schedule | warm-up on rank r | W trails B by | bubble for M >= P, per rank | held on rank r |
|---|---|---|---|---|
| 1f1b | P-1-r | unsplit | (P-1)(F+B+W) | P-r |
| interleaved_1f1b | (v-1)k + 2(P-1-r) | unsplit | the same / v | (v-1)k + 2(P-1-r) + 1 |
| zb_h1 | P-1-r | r | (P-1)(F+B-W) | P-r until B, P until W |
| zb_h2 | 2(P-1-r) | 2r | (P-1)(F+B-2W) in span | 2(P-r)-1 until B, 2P-1 until W |
| interleaved_zb | (v-1)k + P-1-r | r | zb_h1's / v | (v-1)k + P-r until B |

k = M / max(1, M div P) is the number of microbatches of a round. A chunk counts as one microbatch
held. Sources: Narayanan et al. 2021 (1F1B, interleaved), Lamy-Poirier 2023 (breadth-first), Qi et
al. 2024 "Zero Bubble Pipeline Parallelism", sections 2 and 3 (H1, H2), PyTorch's
`torch.distributed.pipelining` (interleaved_zb, and the meaning of k).
"""

from collections import deque

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order (Huang et al. 2019, Fig. 2c).

    >>> gpipe(2, 2).orders()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    every = range(microbatches)
    orders = [
        [*(Action(Op.F, r, m) for m in every), *(Action(Op.BW, r, m) for m in every)]
        for r in range(pp)
    ]
    return Schedule.of("gpipe", Placement.loop(pp), microbatches, orders)


def bfs(
    pp: int, microbatches: int, virtual_stages: int = 1, *, breadth: int | None = None
) -> Schedule:
    """Breadth-first: groups of `breadth` microbatches (None: all) through every stage and back.

    >>> bfs(1, 2, 2).orders()
    [['0F0', '0F1', '1F0', '1F1', '1B1', '1B0', '0B1', '0B0']]
    """
    breadth = microbatches if breadth is None else breadth
    if breadth < 1 or microbatches % breadth:
        raise ScheduleError(
            f"bfs: microbatches={microbatches} must be a multiple of breadth={breadth}."
        )
    orders: list[list[Action]] = [[] for _ in range(pp)]
    for first in range(0, microbatches, breadth):
        group = range(first, first + breadth)
        for r, order in enumerate(orders):
            stages = range(r, pp * virtual_stages, pp)
            order += [Action(Op.F, s, m) for s in stages for m in group]
            order += [Action(Op.BW, s, m) for s in reversed(stages) for m in reversed(group)]
    return Schedule.of("bfs", Placement.loop(pp, virtual_stages), microbatches, orders)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """Fewer microbatches than ranks are legal: the warm-up is then cut at M.

    >>> print("\\n".join(" ".join(order) for order in one_f_one_b(2, 3).orders()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    orders = [_alternate(pp, r, microbatches, 1, pp - 1 - r, None) for r in range(pp)]
    return Schedule.of("1f1b", Placement.loop(pp), microbatches, orders)


def interleaved_1f1b(pp: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B over v stages a rank: a bubble v times shorter for v times the transfers."""
    k = _round(pp, microbatches, "interleaved_1f1b")
    orders = [
        _alternate(
            pp, r, microbatches, virtual_stages, (virtual_stages - 1) * k + 2 * (pp - 1 - r), None
        )
        for r in range(pp)
    ]
    placement = Placement.loop(pp, virtual_stages)
    return Schedule.of("interleaved_1f1b", placement, microbatches, orders)


def zb_h1(pp: int, microbatches: int) -> Schedule:
    """Zero bubble at 1F1B's memory: W fills the drain.

    >>> print("\\n".join(" ".join(order) for order in zb_h1(2, 3).orders()))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    orders = [_alternate(pp, r, microbatches, 1, pp - 1 - r, r) for r in range(pp)]
    return Schedule.of("zb_h1", Placement.loop(pp), microbatches, orders)


def zb_h2(pp: int, microbatches: int) -> Schedule:
    """Zero bubble at twice the memory: the trapezoid becomes a parallelogram."""
    orders = [_alternate(pp, r, microbatches, 1, 2 * (pp - 1 - r), 2 * r) for r in range(pp)]
    return Schedule.of("zb_h2", Placement.loop(pp), microbatches, orders)


def interleaved_zb(pp: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """`zb_h1` over v stages a rank."""
    k = _round(pp, microbatches, "interleaved_zb")
    orders = [
        _alternate(pp, r, microbatches, virtual_stages, (virtual_stages - 1) * k + pp - 1 - r, r)
        for r in range(pp)
    ]
    return Schedule.of("interleaved_zb", Placement.loop(pp, virtual_stages), microbatches, orders)


def _round(pp: int, microbatches: int, name: str) -> int:
    """k, the microbatches of a round, which must come out even."""
    rounds = max(1, microbatches // pp)
    if microbatches % rounds:
        raise ScheduleError(
            f"{name}: microbatches={microbatches} must be a multiple of the number of rounds, "
            f"{rounds} (microbatches // pp={pp}): use {microbatches // rounds * rounds} or "
            f"{(microbatches // rounds + 1) * rounds}."
        )
    return microbatches // rounds


def _alternate(
    pp: int, rank: int, microbatches: int, chunks: int, warmup: int, lag: int | None
) -> list[Action]:
    """One rank's order. `lag` None leaves gradients unsplit; else W runs `lag` behind B.

    Forward i works on chunk (i div k) mod v, gradient i on the same counted from the last chunk.
    """
    k = microbatches // max(1, microbatches // pp) if chunks > 1 else microbatches
    total = microbatches * chunks
    warmup = min(warmup, total)

    def place_of(index: int) -> tuple[int, int]:
        """`(chunk, microbatch)` of the i-th forward."""
        turn, within = divmod(index, k)
        return turn % chunks, turn // chunks * k + within

    def forward(index: int) -> Action:
        chunk, m = place_of(index)
        return Action(Op.F, chunk * pp + rank, m)

    def gradient(index: int) -> Action:
        chunk, m = place_of(index)
        return Action(Op.BW if lag is None else Op.B, (chunks - 1 - chunk) * pp + rank, m)

    order = [forward(i) for i in range(warmup)]
    pending: deque[Action] = deque()
    for i in range(total):
        if warmup + i < total:
            order.append(forward(warmup + i))
        order.append(gradient(i))
        if lag is not None:
            pending.append(order[-1]._replace(op=Op.W))
            if len(pending) > lag:
                order.append(pending.popleft())
    return order + list(pending)
