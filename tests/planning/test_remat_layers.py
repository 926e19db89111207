"""Layers of which B recomputes everything: bytes, seconds, and the advice to have some."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.planning import Hardware, advise, analytic, arrange, estimate, resolve

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SIZES = ("parallel.pp=2", "parallel.dp=1", "model.n_layers=8", "train.grad_accum_steps=8")


def loaded(layers, *overrides, remat="selective"):
    """Return a configuration with four layers per stage."""
    how = f"train.remat={remat}", f"train.remat_layers={layers}"
    return configs.load(SMALL, [*SIZES, *how, *overrides])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_each_layer_saves_the_same_and_takes_as_much_longer(schedule):
    how = f"parallel.schedule={schedule}"
    plans = [arrange(loaded(layers, how)) for layers in range(4)]
    plans.append(arrange(loaded(0, how, remat="full")))
    stored = [replace(plan, lockstep=plans[0].lockstep).memory.activations for plan in plans]
    (saved,) = {before - after for before, after in pairwise(stored)}
    assert saved > 0
    costs = [plan.costs for plan in plans]
    backward = [of.F[0] + of.B[-1] + of.W[-1] for of in costs]
    longer = [after - before for before, after in pairwise(backward)]
    assert longer == pytest.approx([longer[0]] * 4)
    assert longer[0] > 0


def test_measured_seconds_of_other_layers_are_kept():
    config = loaded(2)
    measured, computed = analytic(loaded(0), Hardware()), analytic(config, Hardware())
    assert structs.replace(computed, again=measured.again) == measured


def test_all_layers_are_too_many():
    with pytest.raises(ConfigError, match="train.remat_layers=4 are all layers of the longest"):
        resolve(loaded(4))


def test_what_is_computed_with_does_not_grow_with_the_layers_of_a_stage():
    """Residuals of one layer are written while the next one runs."""
    few, many = (
        resolve(loaded(0, "parallel.pp=1", f"model.n_layers={layers}")).memory for layers in (4, 16)
    )
    assert many.activations > 3 * few.activations
    assert many.working == few.working


def test_the_advice_is_as_few_layers_as_fit():
    config = loaded(0)
    every = [estimate(arrange(config))]
    sizes = [arrange(loaded(layers)).memory.total for layers in range(4)]
    between = (sizes[1] + sizes[2]) / 2
    (sentence,) = advise(config, every, memory=between, bubble=None).sentences
    assert "or set train.remat_layers=2." in sentence
    (sentence,) = advise(config, every, memory=sizes[3] - 1, bubble=None).sentences
    assert "or set train.remat='full'." in sentence
