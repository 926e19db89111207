"""Mixtures of experts under every schedule and mesh, against the one-hot twin on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from mixtures import EXAMPLES, LENGTH, MICROBATCHES, run

CASES = [
    ("qwen", "gpipe", (2, 4, 1, 4), {}),
    ("deepseek", "1f1b", (2, 2, 2, 2), {"remat": "selective"}),
    ("switch", "interleaved_1f1b", (2, 2, 2, 2), {"sequence": True, "zero_stage": 1}),
    ("deepseek", "zb_h1", (4, 2, 1, 2), {"remat": "full", "zero_stage": 2}),
    ("qwen", "zbv", (2, 2, 2, 1), {"sequence": True}),
    ("narrow", "dualpipe", (2, 4, 1, 2), {"zero_stage": 1}),
    ("deepseek", "dualpipev", (2, 4, 1, 2), {"zero_stage": 3, "reshard_after_forward": True}),
]


@pytest.mark.parametrize(("model", "name", "mesh", "how"), CASES)
def test_every_schedule_agrees_with_the_twin(model, name, mesh, how):
    with jax.enable_x64(True):
        got, want = run(model, name, *mesh, poison_bubbles=True, **how)
        assert_same(got, want)
        counts = np.asarray(got.side.sums["expert_counts"])
        tokens = MICROBATCHES * EXAMPLES * LENGTH
        assert (counts.sum(1) % tokens == 0).all() and (counts.sum(1) > 0).all()
