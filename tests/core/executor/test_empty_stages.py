"""Stages without a layer, which have the embedding or the head alone, against one device."""

import pytest
from orders import near
from toy_steps import check

from jaxpipe.core.schedule import Lockstep

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipev")
HOW = {
    "plain": {},
    "two-tick transfers": {"lockstep": Lockstep(2), "remat": "full"},
    "deferred embedding and head": {"lockstep": Lockstep(defer_embed_head=True)},
    "shards": {"dp": 2, "zero_stage": 3},
}


def ends_alone(stages):
    return [0, *(1 + stage % 2 for stage in range(stages - 2)), 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_embedding_and_head_alone(name):
    schedule = near(name, 2 if name == "interleaved_1f1b" else 4, 4, 2)
    check(schedule, ends_alone(schedule.stages))


@pytest.mark.extended
@pytest.mark.parametrize("name", [*SCHEDULES, "zbv", "dualpipe"])
@pytest.mark.parametrize("how", [how for how in HOW if how != "plain"])
def test_however_it_runs(name, how):
    schedule = near(name, 2 if name == "interleaved_1f1b" else 4, 4, 2)
    check(schedule, ends_alone(schedule.stages), **HOW[how])
