"""R, recomputation ahead of B, changes no result, whatever the schedule and the execution."""

import pytest
from orders import build
from signature import schedule_of
from toy_steps import check, uneven

from jaxpipe.core.schedule import ORDERS, Costs, Lockstep, recompute_ahead

COSTS = Costs(R=1.0)


@pytest.mark.extended(unless=["1f1b-2", "zbv-1"])
@pytest.mark.parametrize("ticks", [1, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_every_order(name, ticks):
    """Stages differ in length; forwards of 1F1B run ahead of the order."""
    lockstep = Lockstep(ticks, in_flight=3 if name == "1f1b" else None, pairs=False)
    schedule, lockstep = recompute_ahead(schedule_of(name, 2), COSTS, lockstep)
    assert schedule.recomputes
    check(schedule, uneven(schedule.stages), remat="full", lockstep=lockstep)


@pytest.mark.extended(unless=["zb_h1-ZeRO 3"])
@pytest.mark.parametrize(
    "how",
    [
        {"zero_stage": 3, "reshard_after_forward": True},
        {"overlap_sums": True, "zero_stage": 2},
        {"remat": "selective"},
        {"remat": "none"},
        {"lockstep": Lockstep(defer_embed_head=True, pairs=False)},
    ],
    ids=["ZeRO 3", "overlap", "selective", "none", "deferred"],
)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_every_way_to_run(name, how):
    """Two replicas; a policy of F other than full rematerialisation is allowed, and no gain."""
    how = {"remat": "full", "lockstep": Lockstep(transfer_ticks=2)} | how
    schedule, how["lockstep"] = recompute_ahead(
        build(name, pp=2, microbatches=5), COSTS, how["lockstep"]
    )
    check(schedule, (3, 2), 2, **how)
