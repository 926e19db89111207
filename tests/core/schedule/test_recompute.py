"""Where R stands in a schedule, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from orders import near

from jaxpipe.core.schedule import (
    ORDERS,
    Action,
    Cell,
    Costs,
    Lockstep,
    Op,
    ScheduleError,
    dualpipe,
    lower,
    one_f_one_b,
    recompute_ahead,
    simulate,
    validate,
    write_schedule,
)
from jaxpipe.core.schedule.placing import place
from jaxpipe.core.schedule.scan import scan_time

LOCKSTEPS = [Lockstep(pairs=False), Lockstep(transfer_ticks=2, pairs=False)]
LOCKSTEPS += [replace(LOCKSTEPS[0], in_flight=6), replace(LOCKSTEPS[1], every=2, offset=1)]


@pytest.mark.parametrize("lockstep", LOCKSTEPS, ids=["1", "2", "in flight", "paced"])
@pytest.mark.parametrize("name", ORDERS)
def test_every_other_action_keeps_its_tick(name, lockstep):
    rng = np.random.default_rng(hash(name) % 100)
    for _ in range(3):
        schedule, costs = near(name, 4, 8), Costs(*rng.uniform(0.5, 2, 3), R=rng.uniform(0.5, 2))
        try:
            before = place(schedule, lockstep)
        except ScheduleError:  # the limit is too low for the order, or no tick is open to a cell
            continue
        ahead, in_order = recompute_ahead(schedule, costs, lockstep)
        validate(ahead)
        after = place(ahead, in_order)
        assert tuple(tuple(c._replace(recompute=None) for c in row) for row in after) == before
        assert lower(ahead, in_order).recomputations
        grid_of = [[c._replace(recompute=behind(c)) for c in row] for row in before]
        orders = (tuple(filter(lambda c: c.actions, cells)) for cells in zip(*grid_of))
        all_behind = replace(schedule, ranks=tuple(orders))
        longest = scan_time(all_behind, costs, in_order)
        assert scan_time(ahead, costs, in_order) <= longest * (1 + 1e-12)


def behind(cell):
    """Return the R of a cell's own B or BW."""
    gradient = cell.gradient
    return gradient._replace(op=Op.R) if gradient and gradient.op.computes_dx else None


def test_a_rank_recomputes_one_microbatch_ahead():
    """What R stores of it has one slot a chunk where B frees it before the next R."""
    schedule, lockstep = recompute_ahead(one_f_one_b(4, 16), Costs(R=1.0))
    slots = lower(schedule, lockstep).slots
    assert (slots.for_b, slots.for_w, slots.for_r) == (1, 1, 4)


def test_it_gains_where_ranks_wait():
    """1F1B in which a rank waits for B longer than R takes: all of R but the first rank's."""
    costs = Costs(F=1.0, B=1.0, W=1.0, R=1.0)
    schedule = one_f_one_b(4, 8)
    full = simulate(schedule, replace(costs, B=2.0))
    ahead, lockstep = recompute_ahead(schedule, costs)
    got = simulate(ahead, costs, lockstep)
    assert got.scan_makespan < 0.95 * full.scan_makespan
    assert got.makespan < full.makespan


R7 = Action(Op.R, 0, 7)


def without_r7(cell):
    return cell._replace(recompute=None) if cell.recompute == R7 else cell


def broken(schedule, change):
    """Return a schedule with R, and `change` applied to the cells of its first rank."""
    schedule, _ = recompute_ahead(schedule, Costs(R=1.0))
    first, *others = schedule.ranks
    return replace(schedule, ranks=(tuple(change(list(first))), *others))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda cells: [*map(without_r7, cells), Cell(recompute=R7)], "BW7@0"),
        (lambda cells: [Cell(recompute=R7), *map(without_r7, cells)], "R7@0"),
        (lambda cells: [*map(without_r7, cells)], "BW7@0"),
    ],
    ids=["late", "before its F", "missing"],
)
def test_an_r_that_is_missing_or_misplaced(change, names):
    with pytest.raises(ScheduleError, match=names):
        validate(broken(one_f_one_b(2, 8), change))


def test_what_r_is_not_for(tmp_path):
    slices = replace(one_f_one_b(2, 8), slices=2)
    schedule, lockstep = recompute_ahead(one_f_one_b(2, 8), Costs(R=1.0))
    with pytest.raises(ScheduleError, match="slices=2"):
        validate(recompute_ahead(slices, Costs(R=1.0))[0])
    with pytest.raises(ScheduleError, match="in_flight"):
        lower(schedule, replace(lockstep, in_flight=3))
    with pytest.raises(ScheduleError, match="R"):
        write_schedule(schedule, tmp_path / "schedule.csv")
    with pytest.raises(ScheduleError, match="pairs=False"):
        lower(*recompute_ahead(dualpipe(4, 8), Costs(R=1.0)))
