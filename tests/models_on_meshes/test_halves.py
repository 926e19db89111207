"""Layers that run on two halves of the rows, against one device: losses and gradients."""

from itertools import product

import jax
import jax.numpy as jnp
import mixtures
import pytest
from compare import assert_same
from meshes import run

SCHEDULES, REMAT = ("1f1b", "zb_h1", "zbv", "dualpipev"), ("none", "selective", "full")
STAGES = {"zbv": "deep", "dualpipev": "deep"}


@pytest.mark.slow(unless=["1f1b-full-packed", "zb_h1-selective-grouped"])
@pytest.mark.parametrize(
    ("schedule", "remat", "model"), [*product(SCHEDULES, REMAT, ("grouped", "packed"))]
)
def test_halves_with_shared_layers(schedule, remat, model):
    how = {"sequence": model == "grouped", "remat": remat, "overlap_halves": True}
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, 2, 1, 2, dtype=jnp.float64, poison_bubbles=True, **how))


@pytest.mark.slow(unless=["1f1b-full"])
@pytest.mark.parametrize(("schedule", "remat"), [*product(SCHEDULES, REMAT)])
def test_halves_with_shared_experts(schedule, remat):
    how = {"remat": remat, "overlap_halves": True, "poison_bubbles": True}
    assert_same(*mixtures.run("deepseek", schedule, 2, 2, 1, 2, **how))
