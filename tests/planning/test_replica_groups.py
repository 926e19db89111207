"""What groups of replicas (`parallel.dp_replicate`) send: shards across groups, the rest inside."""

import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.planning import Hardware
from jaxpipe.planning.cost.estimate import update_seconds
from jaxpipe.planning.cost.hardware import op_seconds
from jaxpipe.planning.cost.memory import layout_of
from jaxpipe.planning.cost.parameter_traffic import step_traffic
from jaxpipe.planning.cost.state_sizes import stored_values
from jaxpipe.planning.resolve import arrange
from jaxpipe.planning.rules.sizes import resolve_sizes


def plan_of(groups, stage, *overrides):
    words = ["parallel.pp=2", "parallel.dp=8", "parallel.schedule=1f1b", "parallel.tp=1",
             f"parallel.dp_replicate={groups}", f"parallel.zero_stage={stage}",
             "train.compute_dtype=bfloat16"]  # fmt: skip
    config = resolve_sizes(configs.load(SMALL, [*words, *overrides]), None)
    return config, layout_of(config, arrange(config).schedule.placement, arrange(config).layers)


@pytest.mark.parametrize("overrides", [(), ("parallel.reshard_after_forward=true",)])
def test_groups_reduce_inside_and_then_across(overrides):
    """Of a ring of n each device sends (n - 1) / n; a shard of a group of 4 is a fourth."""
    one, two = (step_traffic(*plan_of(groups, 3, *overrides)) for groups in (1, 2))
    assert one.summed == one.across == two.summed == 0
    assert two.scattered < one.scattered
    assert two.gathered < one.gathered
    kinds, embed_head = stored_values(plan_of(2, 3)[0])
    for (trained, _), devices in ((kinds["layer"], 4), (embed_head, 8)):  # and over 2 pp ranks
        assert trained.reduced == pytest.approx(trained.full * (1 - 1 / devices))
        assert trained.across == pytest.approx(trained.full / devices / 2)
    # An all-reduce of all replicas is as much as both reductions in turn.
    summed = step_traffic(*plan_of(2, 1)).summed
    split = step_traffic(*plan_of(2, 2))
    assert summed == pytest.approx(2 * split.scattered + split.across)
    assert summed == pytest.approx(step_traffic(*plan_of(1, 1)).summed)


def test_groups_of_a_host_spare_the_network():
    hardware = Hardware(link=1e9, network=1e7, per_host=4)
    seconds = []
    for groups in (1, 2):
        config, layout = plan_of(groups, 2)
        seconds.append(update_seconds(config, layout, op_seconds(config, hardware)))
    assert seconds[1] < 0.6 * seconds[0]
