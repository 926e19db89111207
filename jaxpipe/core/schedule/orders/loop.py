"""Schedules on the loop placement: stage s on rank s mod P, v stages per rank.

Two families. Breadth-first runs a group of microbatches through all stages, then back. The
alternating family warms up with forwards, then alternates one forward with one gradient, then
drains; its members differ in the length of the warm-up and in how far W lags behind B:

| schedule | warm-up on rank r | lag of W behind B | bubble for M >= P, per rank | live on rank r |
|---|---|---|---|---|
| 1f1b | P-1-r | unsplit | (P-1)(F+B+W) | P-r |
| interleaved_1f1b | (v-1)k + 2(P-1-r) | unsplit | the same / v | (v-1)k + 2(P-1-r) + 1 |
| zb_h1 | P-1-r | r | (P-1)(F+B-W) | P-r until B, P until W |
| zb_h2 | 2(P-1-r) | 2r | (P-1)(F+B-2W) in span | 2(P-r)-1 until B, 2P-1 until W |
| interleaved_zb | (v-1)k + P-1-r | r | zb_h1's / v | (v-1)k + P-r until B |

k is the number of microbatches that a rank runs through one stage before its next stage:
M / max(1, M div P), or the option `breadth` (Megatron's `microbatch_group_size_per_vp_stage`; the
last group may be smaller). The last column counts (microbatch, chunk) pairs. Sources: Narayanan et
al. 2021 (1F1B, interleaved), Lamy-Poirier 2023 (breadth-first), Qi et al. 2024 "Zero Bubble
Pipeline Parallelism", sections 2 and 3 (H1, H2), PyTorch's `torch.distributed.pipelining`
(interleaved_zb, and the meaning of k).

All of them can divide sequences into `slices`, which pass through the pipeline one by one (Li et
al. 2021, "TeraPipe"; under 1F1B: Sun et al. 2024, "Seq1F1B"). A slice attends to earlier slices,
so their gradients need its gradient first: gradients come in reverse order within a sequence, and
the warm-up is longer by `slices - 1`. The bubble keeps its length, counted in slices, which are
shorter than microbatches. Under 1F1B, P - r + slices - 1 slices are live on rank r.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.core.schedule.action import Action, Op, Placement, Schedule, ScheduleError


def gpipe(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build GPipe: all forwards, then all backwards, in microbatch order.

    Source: Huang et al. 2019, Fig. 2c.

    >>> gpipe(2, 2).notation()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    every = range(microbatches * slices)
    orders = [
        [
            *(Action(Op.F, r, m) for m in every),
            *(Action(Op.BW, r, _gradient_microbatch(m, slices)) for m in every),
        ]
        for r in range(pp)
    ]
    return Schedule.from_orders("gpipe", Placement.loop(pp), len(every), orders, slices)


def bfs(
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
    *,
    breadth: int | None = None,
    slices: int = 1,
) -> Schedule:
    """Build breadth-first: groups of `breadth` microbatches go through every stage and back.

    `breadth` None: all microbatches form one group. Raises `ScheduleError` where `breadth` does not
    divide `microbatches`.

    >>> bfs(1, 2, 2).notation()
    [['0F0', '0F1', '1F0', '1F1', '1B1', '1B0', '0B1', '0B0']]
    """
    breadth = microbatches if breadth is None else breadth
    if breadth < 1 or microbatches % breadth:
        raise ScheduleError(
            f"bfs: microbatches={microbatches} must be a multiple of breadth={breadth}."
        )
    orders: list[list[Action]] = [[] for _ in range(pp)]
    for first in range(0, microbatches, breadth):
        group = range(first * slices, (first + breadth) * slices)
        for r, order in enumerate(orders):
            stages = range(r, pp * virtual_stages, pp)
            order += [Action(Op.F, s, m) for s in stages for m in group]
            order += [Action(Op.BW, s, m) for s in reversed(stages) for m in reversed(group)]
    placement = Placement.loop(pp, virtual_stages)
    return Schedule.from_orders("bfs", placement, microbatches * slices, orders, slices)


def one_f_one_b(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build 1F1B. With fewer microbatches than ranks the warm-up ends after M forwards.

    >>> print("\\n".join(" ".join(order) for order in one_f_one_b(2, 3).notation()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(*one_f_one_b(1, 2, slices=2).notation()[0])
    0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2
    """
    return _build_alternating(
        "1f1b", _LoopSizes(pp, microbatches, slices), warmup=lambda r: pp - 1 - r
    )


def interleaved_1f1b(
    pp: int,
    microbatches: int,
    virtual_stages: int = 2,
    *,
    breadth: int | None = None,
    slices: int = 1,
) -> Schedule:
    """Build 1F1B over v stages per rank: a bubble v times shorter for v times the transfers."""
    return _build_alternating(
        "interleaved_1f1b", _LoopSizes(pp, microbatches, slices, virtual_stages, breadth),
        warmup=lambda r: 2 * (pp - 1 - r),
    )  # fmt: skip


def zb_h1(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build ZB-H1, a smaller bubble than 1F1B at its memory: W fills the drain.

    >>> print("\\n".join(" ".join(order) for order in zb_h1(2, 3).notation()))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _build_alternating(
        "zb_h1", _LoopSizes(pp, microbatches, slices), warmup=lambda r: pp - 1 - r, lag=lambda r: r
    )


def zb_h2(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build ZB-H2, zero bubble at twice 1F1B's memory: ranks start and end one after the other."""
    return _build_alternating(
        "zb_h2", _LoopSizes(pp, microbatches, slices),
        warmup=lambda r: 2 * (pp - 1 - r), lag=lambda r: 2 * r,
    )  # fmt: skip


def interleaved_zb(
    pp: int,
    microbatches: int,
    virtual_stages: int = 2,
    *,
    breadth: int | None = None,
    slices: int = 1,
) -> Schedule:
    """Build `zb_h1` over v stages per rank."""
    return _build_alternating(
        "interleaved_zb", _LoopSizes(pp, microbatches, slices, virtual_stages, breadth),
        warmup=lambda r: pp - 1 - r, lag=lambda r: r,
    )  # fmt: skip


class _LoopSizes(NamedTuple):
    pp: int
    microbatches: int
    slices: int
    chunks: int = 1
    breadth: int | None = None


def _build_alternating(
    name: str,
    sizes: _LoopSizes,
    *,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> Schedule:
    """Build a schedule from each rank's warm-up within a chunk and the lag of W behind B."""
    pp, microbatches, slices, chunks, _ = sizes
    groups = _split_into_rounds(name, sizes) if chunks > 1 else [microbatches]
    rank_order = _RankOrder(
        pp, chunks, slices, _forward_order(chunks, [size * slices for size in groups])
    )
    ahead = (chunks - 1) * groups[0] * slices + slices - 1
    orders = [rank_order.order(r, ahead + warmup(r), lag and lag(r)) for r in range(pp)]
    return Schedule.from_orders(
        name, Placement.loop(pp, chunks), microbatches * slices, orders, slices
    )


def _split_into_rounds(name: str, sizes: _LoopSizes) -> list[int]:
    """Return the microbatches of every round: equal rounds, or `breadth` each and a remainder."""
    pp, microbatches, slices, _, breadth = sizes
    least = -(-pp // slices)  # the fewest microbatches that occupy all ranks
    if breadth is None:
        rounds = max(1, microbatches // least)
        if microbatches % rounds:
            raise ScheduleError(
                f"{name}: microbatches={microbatches} must be a multiple of the number of rounds, "
                f"{rounds} (microbatches // {least}, the fewest that fill pp={pp}): use "
                f"{microbatches // rounds * rounds} or {(microbatches // rounds + 1) * rounds}."
            )
        return [microbatches // rounds] * rounds
    whole, rest = divmod(microbatches, breadth)
    if min(breadth, rest or breadth) < min(least, microbatches):
        raise ScheduleError(
            f"{name}: breadth={breadth} leaves groups of {breadth} and {rest} microbatches, but "
            f"one of fewer than {least} does not fill pp={pp}: use a breadth of at least {least} "
            f"that divides microbatches={microbatches}, or leaves as many."
        )
    return [breadth] * whole + [rest] * bool(rest)


def _forward_order(chunks: int, groups: list[int]) -> list[tuple[int, int]]:
    """Return `(chunk, microbatch)` of a rank's forwards: each group passes chunk after chunk.

    >>> _forward_order(2, [2, 1])
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    turns, first = [], 0
    for size in groups:
        turns += [(chunk, m) for chunk in range(chunks) for m in range(first, first + size)]
        first += size
    return turns


def _gradient_microbatch(index: int, slices: int) -> int:
    """Return the microbatch of a stage's `index`-th gradient: slices in reverse per sequence.

    >>> [_gradient_microbatch(index, slices=2) for index in range(4)]
    [1, 0, 3, 2]
    """
    sequence, within = divmod(index, slices)
    return (sequence + 1) * slices - 1 - within


@dataclass(frozen=True)
class _RankOrder:
    """The i-th forward and the i-th gradient of a rank.

    `forwards` is the result of `_forward_order`; gradient i is of the same chunk, counted from the
    last.
    """

    pp: int
    chunks: int
    slices: int
    forwards: list[tuple[int, int]]

    def order(self, rank: int, warmup: int, lag: int | None) -> list[Action]:
        """Return one rank's order. W lags `lag` behind B; None leaves gradients unsplit."""
        total = len(self.forwards)
        warmup = min(warmup, total)
        order = [self._forward(rank, i) for i in range(warmup)]
        pending: deque[Action] = deque()
        for i in range(total):
            if warmup + i < total:
                order.append(self._forward(rank, warmup + i))
            order.append(self._gradient(rank, i, Op.BW if lag is None else Op.B))
            if lag is not None:
                pending.append(order[-1]._replace(op=Op.W))
                if len(pending) > lag:
                    order.append(pending.popleft())
        return order + list(pending)

    def _forward(self, rank: int, index: int) -> Action:
        chunk, m = self.forwards[index]
        return Action(Op.F, chunk * self.pp + rank, m)

    def _gradient(self, rank: int, index: int, op: Op) -> Action:
        chunk, m = self.forwards[index]
        stage = (self.chunks - 1 - chunk) * self.pp + rank
        return Action(op, stage, _gradient_microbatch(m, self.slices))
