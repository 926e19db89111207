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

k is the number of microbatches that a rank runs through one stage before it turns to its next:
M / max(1, M div P), or the `breadth` that is asked for (Megatron's
`microbatch_group_size_per_vp_stage`; the last group may be smaller). A chunk counts as one
microbatch held. Sources: Narayanan et al. 2021 (1F1B, interleaved), Lamy-Poirier 2023
(breadth-first), Qi et al. 2024 "Zero Bubble Pipeline Parallelism", sections 2 and 3 (H1, H2),
PyTorch's `torch.distributed.pipelining` (interleaved_zb, and the meaning of k).

All can cut sequences into `slices` in time, each with a passage of its own (Li et al. 2021,
"TeraPipe"; under 1F1B: Sun et al. 2024, "Seq1F1B"). A slice attends to those before it, so it
returns before them: gradients come in the reverse order within a sequence, and a warm-up is longer
by `slices - 1`. The bubble stays so many slices long, which are shorter; a rank holds P - r +
slices - 1 of them under 1F1B.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError


def gpipe(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """All forwards, then all backwards, both in microbatch order (Huang et al. 2019, Fig. 2c).

    >>> gpipe(2, 2).orders()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    every = range(microbatches * slices)
    orders = [
        [
            *(Action(Op.F, r, m) for m in every),
            *(Action(Op.BW, r, _returning(m, slices)) for m in every),
        ]
        for r in range(pp)
    ]
    return Schedule.of("gpipe", Placement.loop(pp), len(every), orders, slices)


def bfs(
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
    *,
    breadth: int | None = None,
    slices: int = 1,
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
        group = range(first * slices, (first + breadth) * slices)
        for r, order in enumerate(orders):
            stages = range(r, pp * virtual_stages, pp)
            order += [Action(Op.F, s, m) for s in stages for m in group]
            order += [Action(Op.BW, s, m) for s in reversed(stages) for m in reversed(group)]
    placement = Placement.loop(pp, virtual_stages)
    return Schedule.of("bfs", placement, microbatches * slices, orders, slices)


def one_f_one_b(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Fewer microbatches than ranks are legal: the warm-up is then cut at M.

    >>> print("\\n".join(" ".join(order) for order in one_f_one_b(2, 3).orders()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(*one_f_one_b(1, 2, slices=2).orders()[0])
    0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2
    """
    return _alternating("1f1b", _Sizes(pp, microbatches, slices), warmup=lambda r: pp - 1 - r)


def interleaved_1f1b(
    pp: int,
    microbatches: int,
    virtual_stages: int = 2,
    *,
    breadth: int | None = None,
    slices: int = 1,
) -> Schedule:
    """1F1B over v stages a rank: a bubble v times shorter for v times the transfers."""
    return _alternating(
        "interleaved_1f1b", _Sizes(pp, microbatches, slices, virtual_stages, breadth),
        warmup=lambda r: 2 * (pp - 1 - r),
    )  # fmt: skip


def zb_h1(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Zero bubble at 1F1B's memory: W fills the drain.

    >>> print("\\n".join(" ".join(order) for order in zb_h1(2, 3).orders()))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _alternating(
        "zb_h1", _Sizes(pp, microbatches, slices), warmup=lambda r: pp - 1 - r, lag=lambda r: r
    )


def zb_h2(pp: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Zero bubble at twice the memory: the trapezoid becomes a parallelogram."""
    return _alternating(
        "zb_h2", _Sizes(pp, microbatches, slices),
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
    """`zb_h1` over v stages a rank."""
    return _alternating(
        "interleaved_zb", _Sizes(pp, microbatches, slices, virtual_stages, breadth),
        warmup=lambda r: pp - 1 - r, lag=lambda r: r,
    )  # fmt: skip


class _Sizes(NamedTuple):
    pp: int
    microbatches: int
    slices: int
    chunks: int = 1
    breadth: int | None = None


def _alternating(
    name: str,
    sizes: _Sizes,
    *,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> Schedule:
    """A member of the family: of every rank the warm-up within a chunk, and how far W trails B."""
    pp, microbatches, slices, chunks, _ = sizes
    groups = _groups(name, sizes) if chunks > 1 else [microbatches]
    turns = _Turns(pp, chunks, slices, _turns(chunks, [size * slices for size in groups]))
    ahead = (chunks - 1) * groups[0] * slices + slices - 1
    orders = [turns.order(r, ahead + warmup(r), lag and lag(r)) for r in range(pp)]
    return Schedule.of(name, Placement.loop(pp, chunks), microbatches * slices, orders, slices)


def _groups(name: str, sizes: _Sizes) -> list[int]:
    """The microbatches of every round: equal ones, or as many as `breadth` says and a rest."""
    pp, microbatches, slices, _, breadth = sizes
    least = -(-pp // slices)  # the fewest that fill the ranks
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


def _turns(chunks: int, groups: list[int]) -> list[tuple[int, int]]:
    """`(chunk, microbatch)` of every forward of a rank: each group through one chunk after another.

    >>> _turns(2, [2, 1])
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    turns, first = [], 0
    for size in groups:
        turns += [(chunk, m) for chunk in range(chunks) for m in range(first, first + size)]
        first += size
    return turns


def _returning(index: int, slices: int) -> int:
    """The slice whose gradient is the `index`-th of a stage: of each sequence the last first.

    >>> [_returning(index, slices=2) for index in range(4)]
    [1, 0, 3, 2]
    """
    sequence, within = divmod(index, slices)
    return (sequence + 1) * slices - 1 - within


@dataclass(frozen=True)
class _Turns:
    """Which forward and which gradient is the i-th of a rank.

    `forwards` are those of `_turns`; gradient i works on the same chunk counted from the last.
    """

    pp: int
    chunks: int
    slices: int
    forwards: list[tuple[int, int]]

    def order(self, rank: int, warmup: int, lag: int | None) -> list[Action]:
        """One rank's order. `lag` None leaves gradients unsplit; else W runs `lag` behind B."""
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
        return Action(op, stage, _returning(m, self.slices))
