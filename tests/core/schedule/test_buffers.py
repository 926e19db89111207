"""The lengths of ring buffers and the messages of a scan, against those of its tables."""

from contextlib import suppress
from itertools import product

import pytest
from orders import near

from jaxpipe.core.schedule import (
    ORDERS,
    Costs,
    Lockstep,
    Op,
    ScheduleError,
    lower,
    recompute_ahead,
    scan_buffers,
)
from jaxpipe.core.schedule.topological_order import numbered_values
from jaxpipe.core.schedule.values import external_values, produced_value

OPTIONS = list(product((1, 2), (None, 4, 8), (False, True), (False, True), (1, 2)))


def agree(schedule, lockstep):
    tables, buffers = lower(schedule, lockstep), scan_buffers(schedule, lockstep)
    for name in ("ticks", "slots", "rank_slots", "lanes", "pairs", "lockstep"):
        assert getattr(buffers, name) == getattr(tables, name), name
    assert buffers.ops == {action.op for _, action in schedule.actions()}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 12)])
def test_they_are_those_of_the_tables(name, pp, microbatches):
    schedule, compared = near(name, pp, microbatches, 2), 0
    for ticks, in_flight, shared, deferred, phases in OPTIONS:
        if (shared and deferred) or (ticks == phases == 2):
            continue
        lockstep = Lockstep(ticks, in_flight, shared, deferred, phases=phases)
        with suppress(ScheduleError):  # an order that the lockstep forbids
            agree(schedule, lockstep)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_with_recomputation_ahead(name):
    lockstep = Lockstep(transfer_ticks=2, pairs=False)
    ahead, lockstep = recompute_ahead(near(name, 4, 8, 2), Costs(R=0.5), lockstep)
    agree(ahead, lockstep)
    assert Op.R in scan_buffers(ahead, lockstep).ops


@pytest.mark.parametrize("name", ORDERS)
def test_values_by_number_are_the_values(name):
    schedule = near(name, 4, 8, 2)

    def number(value):
        first = schedule.stages * schedule.microbatches * (value.kind == "dx")
        return first + value.stage * schedule.microbatches + value.microbatch

    for order in schedule.ranks:
        for cell, needed, produced in numbered_values(order, schedule):
            assert sorted(needed) == sorted(map(number, external_values(cell, schedule.stages)))
            values = filter(None, map(produced_value, cell.actions))
            assert sorted(produced) == sorted(map(number, values))
