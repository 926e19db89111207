"""What layers in halves cost, by the plan: no less than their bounds, and a sentence of advice."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.lab.search.table import explain_winner
from jaxpipe.planning import Devices, estimate
from jaxpipe.planning.advice import advise
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import op_seconds
from jaxpipe.planning.cost.machine import machine
from jaxpipe.planning.resolve import arrange

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_70b_32gpu_tp4_pp4.toml"
SMALL = ("model.n_layers=8", "model.d_model=2048", "model.n_heads=16", "model.d_ff=8192")
EXPERTS = ("parallel.ep=2", "model.n_experts=8", "model.experts_per_token=2", "model.d_expert=512")


def both(*overrides):
    """The configuration as it is, and in halves."""
    words = ("false", "true")
    return [configs.load(CONFIG, [*overrides, f"parallel.overlap_halves={w}"]) for w in words]


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
