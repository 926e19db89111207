"""The scan's clock as the objective of searches, and the variants that a plan tries."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from legal import QUICK

from jaxpipe.core.schedule import (
    Costs,
    Lockstep,
    MemoryCosts,
    ScheduleError,
    peak_memory,
    simulate,
)
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.schedules import FAMILIES, VariantSizes, build, check_memory

PUBLISHED = Costs(1, 1.15, 0.85, transfer=0.05)


@pytest.mark.parametrize(
    ("pp", "name", "held", "share"),
    [(8, "dualpipe", 9, 0.939), (8, "dualpipev", 16, 0.903), (16, "dualpipev", 32, 0.899)],
)
def test_forwards_from_both_ends_may_run_ahead_in_their_own_memory(pp, name, held, share):
    (ahead,) = (v for v in FAMILIES[name].variants(name, VariantSizes(pp, 64)) if v.in_flight)
    assert ahead.in_flight == held
    schedule, lockstep = build(name, pp=pp, microbatches=4 * pp), Lockstep(2, in_flight=held)
    assert 1 - simulate(schedule, PUBLISHED, lockstep).bubble_scan == pytest.approx(share, abs=1e-3)
    peaks = [max(peak_memory(schedule, MemoryCosts(), how)) for how in (Lockstep(2), lockstep)]
    assert peaks[1] == held <= peaks[0]


@given(
    pp=st.integers(2, 5),
    more=st.integers(0, 8),
    limit=st.sampled_from(["1p", "2p"]),
    lockstep=st.builds(Lockstep, st.integers(1, 2), vocab_parallel=st.booleans()),
    times=st.tuples(*[st.floats(0.3, 3.0)] * 3, st.floats(0.0, 0.5)),
    share=st.floats(0.5, 1.0),
)
@settings(max_examples=12, deadline=None)
def test_zb_auto_is_no_worse_than_what_fits_the_same_memory(
    pp, more, limit, lockstep, times, share
):
    """Compared with zb_h1, zb_h2 and 1f1b, in their own order or running ahead.

    BW may take less than B and W, as where both recompute the forward.
    """
    microbatches, costs = pp + more, Costs(*times)
    unsplit = replace(costs, B=share * costs.B, W=share * costs.W)
    how = {"costs": costs, "unsplit_costs": unsplit, "memory_limit": limit, "effort": QUICK}
    found = build("zb_auto", pp=pp, microbatches=microbatches, lockstep=lockstep, **how)
    packed = 2 * pp - (not lockstep.vocab_parallel)
    ways = [("zb_h1", None), ("zb_h2", None), ("1f1b", None), ("1f1b", pp), ("1f1b", packed)]
    others = []
    for name, in_flight in ways:
        way = replace(lockstep, in_flight=in_flight)
        schedule = build(name, pp=pp, microbatches=microbatches)
        try:
            check_memory(schedule, MemoryCosts(), limit, way)
            others.append(scan_time(schedule, unsplit if name == "1f1b" else costs, way))
        except ScheduleError:  # it needs more memory
            continue
    assert len(others) > 1
    of_found = costs if found.splits_gradients else unsplit
    assert scan_time(found, of_found, lockstep) <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["zbv", "v_half", "zb_auto"])
@given(
    pp=st.integers(2, 4),
    more=st.integers(0, 8),
    lockstep=st.builds(Lockstep, st.integers(1, 2), vocab_parallel=st.booleans()),
    times=st.tuples(*[st.floats(0.3, 3.0)] * 3, st.floats(0.0, 0.5)),
)
@example(pp=2, more=1, lockstep=Lockstep(1), times=(1.0, 1.0, 1.0, 0.0))  # nothing to move
@settings(max_examples=4, deadline=None)
def test_a_search_for_the_scan_is_no_worse_than_one_for_the_span(name, pp, more, lockstep, times):
    costs = Costs(*times)
    how = {"costs": costs, "lockstep": lockstep, "effort": QUICK}
    span, scan = (
        scan_time(
            build(name, pp=pp, microbatches=pp + more, objective=objective, **how), costs, lockstep
        )
        for objective in ("span", "scan")
    )
    assert scan <= span * (1 + 1e-9)
