"""The search behind the automatic schedules.

1. *Building blocks* (`blocks`) give the priority of each op; *rules* (`rules`) turn a block into a
   finite schedule with the true costs and the memory limit. Blocks and rules do not depend on the
   number of microbatches, so the best are found on fewer microbatches: first with the same rules on
   all ranks, then with rules changed rank by rank. A change is kept if the score is no worse.
2. Steps on the longest path of the full schedule are moved; a move is kept if the score is no
   worse. Only such moves can shorten the schedule, as in job-shop scheduling (van Laarhoven et al.
   1992, "Job Shop Scheduling by Simulated Annealing", theorem 1).

If the objective is the time of the scan, both are first done for the span, which is faster to
compute, and then steps are moved again for the time of the scan.

The search is seeded, so that the same request gives the same schedule.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

from jaxpipe.core.schedule.action import Op, Schedule, ScheduleError
from jaxpipe.schedules.search.blocks import enumerate_blocks
from jaxpipe.schedules.search.problem import (
    NEVER,
    SLACK,
    B,
    F,
    Orders,
    Replay,
    Score,
    SearchProblem,
    Step,
    W,
)
from jaxpipe.schedules.search.rules import PriorityRules, list_schedule

_WALKS = 5  # local searches, from the best starting points with distinct scores
# Shares of `effort`; they add up to more than 1, as a move costs a fifth of a list schedule.
_STARTS, _CHANGES, _MOVES, _POLISH = 0.3, 0.2, 1.5, 0.5
_SCANS = 0.5  # share of `effort` for moves that are scored by the time of the scan
_FEW_MOVES = 10  # that gain less than the replay to find the longest path costs
_DISTANCES = (1, 1, 1, 2, 3, 4, 6)


def search_schedule(
    problem: SearchProblem, *, effort: int | None = None, known: Iterable[Schedule] = ()
) -> Schedule:
    """Return the best schedule found.

    Args:
      problem: the placement, microbatches, memory limit and objective.
      effort: approximate number of steps to simulate, about 350,000 per second; None: 350,000, or
        370 schedules of the length that is searched, if that is more.
      known: candidates to start from; those that exceed the memory limit are ignored.

    The result is no worse than any `known` schedule that fits the memory and splits every gradient,
    with one op per cell. If the objective is the time of the scan, it is also no worse than the
    other `known` schedules and than what is found for the span.

    Raises `ScheduleError` where no schedule is found that fits the memory.
    """
    problem.check_limit()
    dice = random.Random(0)
    pp, m = problem.placement.pp, problem.microbatches
    live_limit = min(problem.live_limit * pp // problem.placement.stages, m)
    steady = 2 * max(pp, live_limit)  # twice the most in flight: warm-up and drain do not meet
    effort = effort or max(350_000, 370 * 3 * problem.placement.stages * steady)
    free = problem.asynchronous
    short = replace(free, microbatches=min(m, steady))
    known = [schedule for schedule in known if problem.schedule_fits(schedule)]
    replayed, walks = _replay(free, map(_split_orders, known)), []
    if not replayed or _best(free, replayed)[0][0] > free.lower_bound * (1 + SLACK):
        thorough = effort > 10 * problem.steps  # enough effort to list the full schedule
        walks = _search_locally(short, effort, dice)[: None if thorough else 2]
        starts: list[Orders | None] = []
        for _, orders, rules in walks:
            starts.append(extend_orders(orders, m - short.microbatches))
            if m > short.microbatches and thorough:
                listed = list_schedule(free, rules)
                starts += [listed[1]] if listed else []
        replayed += _replay(free, starts)
    if not replayed:
        raise ScheduleError(
            f"{problem.name}: no schedule found for pp={pp}, microbatches={m} within "
            f"memory_limit={problem.limit:g}: raise it."
        )
    score, orders = _best(free, replayed)
    share = int(effort * _POLISH / problem.steps)
    if m > short.microbatches and score[0] > free.lower_bound * (1 + SLACK):
        score, orders = _move_steps(free, score, orders, share, dice)
    if free is problem:
        return problem.schedule(orders)
    starts = [orders]
    short = replace(problem, microbatches=short.microbatches)
    for _, orders, _ in walks:
        moves = int(effort * _SCANS / short.steps / len(walks))
        before, _ = _best(short, _replay(short, [orders]))
        moved = _move_steps(short, before, orders, moves, dice)[1]
        starts.append(extend_orders(moved, m - short.microbatches))
    score, orders = _best(problem, [*replayed, *_replay(free, starts)])
    best = problem.schedule(_move_steps(problem, score, orders, share, dice)[1])
    return min([best, *known], key=problem.target.scan_time)


_Replayed = list[tuple[Replay, Orders]]


def _replay(problem: SearchProblem, candidates: Iterable[Orders | None]) -> _Replayed:
    """Return the candidates that fit the memory and have no deadlock, with their start times."""
    fitting = [orders for orders in candidates if orders and all(map(problem.order_fits, orders))]
    return [(replay, orders) for orders in fitting if (replay := problem.replay(orders))]


def _best(problem: SearchProblem, replayed: _Replayed) -> tuple[Score, Orders]:
    scored = ((problem.score(*one), one[1]) for one in replayed)
    return min(scored, key=lambda item: item[0])


def extend_orders(orders: Orders, more: int) -> Orders | None:
    """Return orders with `more` additional microbatches, by repeating one period of each rank.

    A period is the run of steps nearest to the middle that has every op of every stage once.
    Returns None where a rank has no period.
    """
    if not more:
        return orders
    longer = []
    for order in orders:
        length = len({step[:2] for step in order})
        middle = (len(order) - length) // 2
        starts = sorted(range(len(order) - length + 1), key=lambda at: abs(at - middle))
        start = next(
            (at for at in starts if len({s[:2] for s in order[at : at + length]}) == length), None
        )
        if start is None:
            return None
        period, after = order[start : start + length], order[start + length :]
        longer.append(order[:start])
        for shift in range(more + 1):
            longer[-1] += [(op, stage, i + shift) for op, stage, i in period]
        longer[-1] += [(op, stage, i + more) for op, stage, i in after]
    return longer


def _search_locally(
    problem: SearchProblem, effort: int, dice: random.Random
) -> list[tuple[Score, Orders, PriorityRules]]:
    """Return the result of a local search from each of the best starting points, best first."""
    best_by_score: dict[Score, tuple[Orders, PriorityRules]] = {}  # the best, with distinct scores
    for rules in islice(
        _starting_rules(problem, dice), max(4, int(effort * _STARTS / problem.steps))
    ):
        most = max(best_by_score)[0] if len(best_by_score) == _WALKS else NEVER
        result = list_schedule(problem, rules, most)
        if result and result[0] not in best_by_score:
            score, orders = result
            best_by_score[score] = orders, rules
            if len(best_by_score) > _WALKS:
                del best_by_score[max(best_by_score)]
    walks = []
    for best, (orders, rules) in sorted(best_by_score.items(), key=lambda item: item[0]):
        for _ in range(int(effort * _CHANGES / problem.steps / len(best_by_score))):
            changed = rules.mutate(dice)
            result = list_schedule(problem, changed, best[0])
            if result and result[0] <= best:  # equal scores too, because plateaus are wide
                (best, orders), rules = result, changed
        share = int(effort * _MOVES / problem.steps / len(best_by_score))
        walks.append((*_move_steps(problem, best, orders, share, dice), rules))
    return sorted(walks, key=lambda item: item[0])


def _starting_rules(problem: SearchProblem, dice: random.Random) -> Iterator[PriorityRules]:
    """Yield blocks with the same rules on all ranks, in the order in which to try them.

    It cycles through blocks that fit the memory, fullest first; the same blocks in random order;
    and random blocks that need more memory, which help only where ops may overtake their order.
    """
    pp, live_limit = problem.placement.pp, max(1, problem.live_limit)
    every = list(product((0, 1, 2), (False, True), (0, 1, 2)))  # follow, wait, fill
    overtaking = [rules for rules in every if rules[0] == 0]
    fit, tall = [], []
    for block in enumerate_blocks(problem.placement):
        if block.peak_live <= live_limit:
            fit += [(block, rules) for rules in every]
        else:
            tall += [(block, rules) for rules in overtaking]
    dice.shuffle(fit)
    dice.shuffle(tall)
    fullest = sorted(fit, key=lambda start: start[0].peak_live)
    seen = set()
    while fullest or fit or tall:
        for source in (fullest, fit, fullest, tall):
            start = source.pop() if source else None
            if start and start not in seen:
                seen.add(start)
                block, (follow, wait, fill) = start
                yield PriorityRules(
                    block.period, block.phases, (follow,) * pp, (wait,) * pp, (fill,) * pp,
                    (live_limit,) * pp, live_limit,
                )  # fmt: skip


def _move_steps(
    problem: SearchProblem, score: Score, orders: Orders, evaluations: int, dice: random.Random
) -> tuple[Score, Orders]:
    """Move steps of the longest path within their rank; return the new score and orders."""
    if evaluations < _FEW_MOVES:
        return score, orders
    orders = list(orders)
    start = problem.replay(orders)
    assert start is not None  # orders without a deadlock
    critical = problem.critical_steps(orders, start.begins)
    for _ in range(evaluations if critical else 0):
        rank, at = dice.choice(critical)
        distance = dice.choice(_DISTANCES)
        old = orders[rank]
        if dice.random() < 0.5:  # move the step earlier, or else the step before it later
            to = max(0, at - distance)
        else:
            at -= 1
            to = min(len(old) - 1, at + distance)
        new = list(old)
        new.insert(to, new.pop(at))
        if not _is_in_order(new[min(at, to) : max(at, to) + 1]) or not problem.order_fits(new):
            continue
        orders[rank] = new
        replay = problem.replay(orders, score[0])
        if replay and (moved := problem.score(replay, orders)) <= score:
            score, critical = moved, problem.critical_steps(orders, replay.begins)
        else:
            orders[rank] = old
    return score, orders


def _is_in_order(steps: Sequence[Step]) -> bool:
    """Return whether F, B and W of a microbatch, and the microbatches of an op, are in order."""
    latest: dict[tuple[int, int], int] = {}
    ops: dict[tuple[int, int], int] = {}
    for op, stage, i in steps:
        if latest.get((op, stage), i) > i or ops.get((stage, i), op) > op:
            return False
        latest[op, stage] = i
        ops[stage, i] = op
    return True


def _split_orders(schedule: Schedule) -> Orders | None:
    """Return a schedule's orders; None where a cell has several actions or an unsplit gradient."""
    kinds = {Op.F: F, Op.B: B, Op.W: W}
    cells = (cell.actions for order in schedule.ranks for cell in order)
    if any(len(actions) > 1 or actions[0].op is Op.BW for actions in cells):
        return None
    return [
        [(kinds[op], stage, i) for cell in order for op, stage, i in cell.actions]
        for order in schedule.ranks
    ]
