"""What layers in halves cost, by the plan: no less than their bounds, and a sentence of advice."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.lab.search.table import explain_winner
from jaxpipe.planning import Devices, estimate
from jaxpipe.planning.advice import _least_in_halves, advise
from jaxpipe.planning.cost.compute import OPS, launches_of_halves
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import op_seconds
from jaxpipe.planning.cost.kernels import Operations
from jaxpipe.planning.cost.machine import machine
from jaxpipe.planning.resolve import arrange

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_70b_32gpu_tp4_pp4.toml"
SMALL = ("model.n_layers=8", "model.d_model=2048", "model.n_heads=16", "model.d_ff=8192")
EXPERTS = ("parallel.ep=2", "model.n_experts=8", "model.experts_per_token=2", "model.d_expert=512")


def both(*overrides, config=CONFIG):
    """The configuration as it is, and in halves."""
    words = ("false", "true")
    return [configs.load(config, [*overrides, f"parallel.overlap_halves={w}"]) for w in words]


@pytest.mark.parametrize("overrides", [SMALL, (*SMALL, *EXPERTS)], ids=["dense", "experts"])
@pytest.mark.parametrize("rows", [1, 2])
def test_halves_take_no_less_than_their_bounds(overrides, rows):
    hardware = machine("dgx-h100")
    plain, halved = (
        op_seconds(one, hardware) for one in both(*overrides, f"train.microbatch_size={rows}")
    )
    assert plain.tensor.F > plain.least_in_halves.tensor.F
    layers = (2, 2, 2, 2)
    bound, costs = (one.costs(layers) for one in (plain.least_in_halves, halved))
    for op in "FBW":
        assert all(
            least <= own * (1 + 1e-9) for least, own in zip(getattr(bound, op), getattr(costs, op))
        )


def test_weight_gradients_of_halves_copy_no_operands():
    """Those of both halves are written beside each other; of 14, one is made in W itself."""
    plain, halved = (
        costs_of(one).kinds["layer"].kernels["W"] for one in both(*SMALL, "train.microbatch_size=2")
    )
    assert halved.launches <= plain.launches + 1
    assert plain.products == halved.products


HYBRID = ("parallel.ep=2", "train.microbatch_size=4")


@pytest.mark.extended
@pytest.mark.parametrize("recipe", ["quickstart_deepseek", "quickstart_hybrid"])
def test_halves_launch_more_kernels_than_the_bound_on_them(recipe):
    """Linear attention launches most: hundreds of kernels in a loop over blocks of a sequence."""
    hardware = machine("dgx-h100")
    plain, halved = both(*HYBRID, config=CONFIG.with_name(f"{recipe}.toml"))
    more = launches_of_halves(plain, hardware)
    launched = [
        {op: costs_of(one).mean(lambda kind, op=op: kind.kernels[op].launches) for op in OPS}
        for one in (plain, halved)
    ]
    for op in OPS:
        least = hardware.seconds(Operations(launches=launched[1][op] - launched[0][op]))
        assert getattr(more, op) <= least * (1 + 1e-9)
    assert more.F > 0
    assert more.whole_backward > 0


@pytest.mark.parametrize("overrides", [
    (), ("parallel.in_flight=7",), ("parallel.schedule=interleaved_1f1b",),
    ("parallel.schedule=zb_h1",), ("parallel.schedule=zb_auto",), EXPERTS,
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_in_halves_takes_no_less_than_its_bound(overrides, rows):
    hardware = machine("dgx-h100")
    sizes = f"train.microbatch_size={rows}", "train.grad_accum_steps=16"
    plain, halved = (plan_of(one)[0] for one in both(*SMALL, *sizes, *overrides))
    least = _least_in_halves(plain, hardware)
    assert 0.5 * halved.seconds < least <= halved.seconds * (1 + 1e-9)


def plan_of(config):
    """The estimate of a configuration, and the sentences of advice on it."""
    hardware = machine("dgx-h100")
    plan = arrange(config, replace(Devices.planned(config), hardware=hardware))
    found = estimate(replace(plan, seconds=op_seconds(config, hardware)))
    advice = advise(config, [found], memory=80e9, bubble=None, hardware=hardware)
    return found, advice.sentences


@pytest.mark.parametrize(("rows", "best"), [(1, "false"), (8, "true")])
def test_a_plan_says_where_halves_pay(rows, best):
    """With few rows kernels lose more time than collectives of F take."""
    (plain, of_plain), (halved, of_halved) = map(
        plan_of, both(*SMALL, "model.d_model=4096", f"train.microbatch_size={rows}")
    )
    fast, slow = (halved, plain) if best == "true" else (plain, halved)
    sentences, others = (of_plain, of_halved) if best == "true" else (of_halved, of_plain)
    (sentence,) = sentences
    assert f"parallel.overlap_halves={best} " in sentence
    assert f"for {slow.seconds / fast.seconds - 1:.1%} more tokens/s" in sentence
    assert others == ()


def test_a_search_explains_the_winner():
    plain, halved = (
        plan_of(one)[0] for one in both(*SMALL, "model.d_model=4096", "train.microbatch_size=8")
    )
    sentence = explain_winner(halved, plain)
    gain = plain.seconds / halved.seconds - 1
    assert sentence.startswith(f"{gain:.1%} faster than pp=4 dp=2 tp=4 sp 1f1b")
    assert ": tp takes " in sentence
    assert explain_winner(halved, halved) == "as fast as pp=4 dp=2 tp=4 sp halves 1f1b"
