"""Assignment of layers to stages by their costs, with the least work of the busiest rank."""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from jaxpipe.core.schedule.action import Placement
from jaxpipe.core.schedule.assignment import assign_layers

_WIDTH = 100  # states that a step keeps
_STARTS = 12  # layers at which the first stage of a chunk may begin
_MANY = 20_000  # amounts of work to choose from


def balance_layers(
    costs: Sequence[float],
    placement: Placement,
    *,
    sizes: Sequence[int] = (),
    most: int | None = None,
) -> tuple[int, ...] | None:
    """Return the number of layers per stage with which the busiest pipeline rank has least work.

    Minimised is the largest sum of costs over the stages that one rank computes and, among splits
    that are equal in it, the largest cost of a stage. The first is the time that a step takes per
    microbatch once the pipeline is full: every rank runs F, B and W of all its stages, and the
    step lasts at least as long as its busiest rank. The second bounds a tick: in tick-synchronous
    execution ranks wait for the slowest cell, which belongs to a single stage. Neither depends on
    the order of actions or on the number of microbatches, so one split serves every schedule with
    the placement, while the exact time of a scan would need a schedule before its stages exist.

    A dynamic program chooses the stages of one rank after the other. Its state is the layers at
    which the stages still to be chosen begin and end; costs are compared as exact integers, so
    every process finds the same split. With one stage per rank the result is optimal, as in other
    placements while no step has more states than it may keep; beyond, a step keeps those with the
    smallest stages.

    Args:
      costs: of every layer; the embedding's belongs to the first, the head's to the last.
      placement: the rank of every stage. In a bidirectional one a rank computes its stages and
        those of the opposite rank, for half of the microbatches each.
      sizes: of every layer, for `most`.
      most: bound on the sum of the sizes of a stage's layers; None: no bound.

    Returns:
      The counts; None if no split is within `most`.

    Raises `ScheduleError` for more stages than layers.

    >>> balance_layers([1, 1, 1, 1, 1, 3], Placement.loop(2))
    (4, 2)
    >>> balance_layers([2, 1, 1, 1, 1, 2, 2, 2], Placement.v_shape(2))
    (1, 2, 3, 2)
    """
    return _balance(tuple(costs), placement, tuple(sizes), most)


def shorter_and_shorter(
    costs: Sequence[float], placement: Placement, sizes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the balanced split, then the best with a smaller largest stage, and so on."""
    most = None
    while counts := balance_layers(costs, placement, sizes=sizes, most=most):
        yield counts
        ends = accumulate(counts, initial=0)
        most = max(sum(sizes[begin:end]) for begin, end in pairwise(ends)) - 1


@lru_cache(maxsize=64)  # plans of many schedules have few placements
def _balance(
    costs: tuple[float, ...], placement: Placement, sizes: tuple[int, ...], most: int | None
) -> tuple[int, ...] | None:
    even = assign_layers(len(costs), placement.stages)
    problem = _Problem.of(costs, placement, sizes, most)
    works = problem.works(problem.busiest(even) if problem.fits(even) else problem.sums[-1])
    at = bisect_left(works, True, key=lambda work: problem.search(work) is not None)
    if at < len(works):
        return problem.search(works[at])
    return even if problem.fits(even) else None


class _Step(NamedTuple):
    """The choice of one stage.

    Attributes:
      stage: that is chosen.
      times: how often its rank computes it.
      edges: the known boundaries of stages before the step, next to stages not yet chosen.
      is_open: whether the stages between each two of them are still to be chosen.
      gap: index of the last edge before the stage.
      after: the edges after the step.
      kept: for each of them its index in `edges`; -2 and -1 are the stage's own boundaries.
      ranks: ranks that are not complete before it.
      completes: whether it is the last stage of its rank.
    """

    stage: int
    times: int
    edges: tuple[int, ...]
    is_open: tuple[bool, ...]
    gap: int
    after: tuple[int, ...]
    kept: tuple[int, ...]
    ranks: int
    completes: bool


class _State(NamedTuple):
    """Stages chosen so far: layers at the edges, and the work of the rank that is not complete."""

    layers: tuple[int, ...]
    work: int


class _Chosen(NamedTuple):
    """How a state was reached: the largest stage, and the stages as (stage, layers, before)."""

    largest: int
    stages: tuple | None


@dataclass(frozen=True)
class _Problem:
    """Layers in integer costs, as running sums; see `balance_layers`."""

    sums: tuple[int, ...]
    sizes: tuple[int, ...]
    most: int | None
    placement: Placement

    @classmethod
    def of(
        cls, costs: Sequence[float], placement: Placement, sizes: Sequence[int], most: int | None
    ) -> "_Problem":
        """The problem with costs as integers of one unit, without rounding."""
        ratios = [cost.as_integer_ratio() for cost in costs]
        unit = max(below for _, below in ratios)  # all are powers of two
        whole = (above * (unit // below) for above, below in ratios)
        running = tuple(accumulate(sizes or (0,) * len(costs), initial=0))
        return cls(tuple(accumulate(whole, initial=0)), running, most, placement)

    @cached_property
    def groups(self) -> list[dict[int, int]]:
        """The stages that each rank computes, with how often; equal ranks once."""
        rank_of, last = self.placement.rank_of, self.placement.pp - 1
        groups: list[Counter[int]] = [Counter() for _ in range(self.placement.pp)]
        for stage, rank in enumerate(rank_of):
            groups[rank][stage] += 1
            if self.placement.mirrored_from is not None:
                groups[last - rank][stage] += 1
        return [dict(group) for at, group in enumerate(groups) if group not in groups[:at]]

    @cached_property
    def steps(self) -> list[_Step]:
        """The stages in the order in which they are chosen: rank by rank."""
        missing, steps = set(range(self.placement.stages)), []
        edges: tuple[int, ...] = (0, self.placement.stages)
        for done, group in enumerate(self.groups):
            for stage, times in group.items():
                is_open = tuple(edge in missing for edge in edges[:-1])
                gap = max(at for at, edge in enumerate(edges) if edge <= stage)
                missing.remove(stage)
                every = sorted({*edges, stage, stage + 1})
                after = tuple(edge for edge in every if edge in missing or edge - 1 in missing)
                own = {stage: -2, stage + 1: -1}
                sources = tuple(edges.index(e) if e in edges else own[e] for e in after)
                ranks, completes = len(self.groups) - done, stage == list(group)[-1]
                steps.append(
                    _Step(stage, times, edges, is_open, gap, after, sources, ranks, completes)
                )
                edges = after
        return steps

    def stage_costs(self, counts: Sequence[int]) -> list[int]:
        """The cost of each stage."""
        ends = accumulate(counts, initial=0)
        return [self.sums[end] - self.sums[begin] for begin, end in pairwise(ends)]

    def busiest(self, counts: Sequence[int]) -> int:
        """The work of the busiest rank."""
        costs = self.stage_costs(counts)
        return max(sum(costs[s] * times for s, times in group.items()) for group in self.groups)

    def works(self, most: int) -> list[int]:
        """The amounts of work that the busiest rank could have, from the least to `most`.

        They are sums of costs of layers, of which a model has few. Where these have too many sums,
        a hundred steps of equal size stand for them.
        """
        least, sums = -(-self.sums[-1] // len(self.groups)), {0}
        times = max(max(group.values()) for group in self.groups)
        for cost, number in Counter(end - begin for begin, end in pairwise(self.sums)).items():
            counts = range(number * times + 1)
            sums = {s + n * cost for s in sums for n in counts if s + n * cost <= most}
            if len(sums) > _MANY:
                return sorted({least + (most - least) * step // 100 for step in range(101)})
        return sorted(work for work in sums if work >= least)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether no stage exceeds `most`."""
        ends = accumulate(counts, initial=0)
        return all(self._fits(begin, end, 1) for begin, end in pairwise(ends))

    def _fits(self, begin: int, end: int, stages: int) -> bool:
        """Whether a number of stages could hold these layers, each within `most`."""
        return self.most is None or self.sizes[end] - self.sizes[begin] <= self.most * stages

    def search(self, most_work: int) -> tuple[int, ...] | None:
        """Return the split with the smallest largest stage; None if no rank may do so little work.

        Args:
          most_work: bound on the work of a rank.
        """
        states = {_State((0, len(self.sums) - 1), 0): _Chosen(0, None)}
        for step in self.steps:
            found: dict[_State, _Chosen] = {}
            for state, chosen in states.items():
                for after, more in self._extend(step, state, chosen, most_work):
                    if after not in found or more.largest < found[after].largest:
                        found[after] = more
            states = self._keep_best(step, found)
        if not states:
            return None
        (chosen,) = states.values()
        counts, chain = {}, chosen.stages
        while chain:
            stage, counts[stage], chain = chain
        return tuple(counts[stage] for stage in sorted(counts))

    def _extend(
        self, step: _Step, state: _State, chosen: _Chosen, most_work: int
    ) -> Iterator[tuple[_State, _Chosen]]:
        """Yield the states that follow a state, from which a split may be within the bounds."""
        sums, stage, at = self.sums, step.stage, step.gap
        first, last = state.layers[at], state.layers[at + 1]
        skipped, left = stage - step.edges[at], step.edges[at + 1] - stage - 1
        rest = self._work_left(step, state)
        starts = range(first + skipped, last - left)
        if skipped:  # those next to where stages of equal cost would begin
            share = (sums[last] - sums[first]) * skipped // (skipped + left + 1)
            near = bisect_left(sums, sums[first] + share) - starts.start
            near = max(0, min(near - _STARTS // 2, len(starts) - _STARTS))
            starts = starts[near : near + _STARTS]
        for begin in starts if skipped else (first,):
            if skipped and not self._fits(first, begin, skipped):
                break
            for end in range(begin + 1, last - left + 1) if left else (last,):
                cost = sums[end] - sums[begin]
                work = state.work + step.times * cost
                if work > most_work or not self._fits(begin, end, 1):
                    break  # more layers cost no less
                others = rest - cost
                if step.completes:
                    fits = others <= most_work * (step.ranks - 1)
                else:
                    fits = others + work <= most_work * step.ranks
                if not fits or (left and not self._fits(end, last, left)):
                    continue
                known = (*state.layers, begin, end)
                after = tuple(known[index] for index in step.kept)
                yield (
                    _State(after, 0 if step.completes else work),
                    _Chosen(max(chosen.largest, cost), (stage, end - begin, chosen.stages)),
                )

    def _work_left(self, step: _Step, state: _State) -> int:
        """The cost of the layers that are in no stage yet, before a step."""
        return sum(
            self.sums[end] - self.sums[begin]
            for is_open, (begin, end) in zip(step.is_open, pairwise(state.layers))
            if is_open
        )

    def _keep_best(self, step: _Step, states: dict[_State, _Chosen]) -> dict[_State, _Chosen]:
        """Return the states whose largest stage, chosen or to come, is smallest, if many."""
        if len(states) <= _WIDTH:
            return states

        def largest(state: _State) -> tuple[int, _State]:
            known = [(edge, self.sums[at]) for edge, at in zip(step.after, state.layers)]
            means = ((cost - start) // (b - a) for (a, start), (b, cost) in pairwise(known))
            return max(states[state].largest, *means), state

        return {state: states[state] for state in heapq.nsmallest(_WIDTH, states, key=largest)}
