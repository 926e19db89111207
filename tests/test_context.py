"""Sequences that replicas share, by every method on whole meshes, against one device."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run
from oracles import fused

RING, ULYSSES = {"cp": 2, "method": "ring"}, {"cp": 2, "method": "ulysses"}


@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("one_kv", "1f1b", (2, 4, 1), RING | {"cp": 4, "zero_stage": 3}),
        ("grouped", "zb_h1", (2, 2, 2), RING | {"sequence": True, "remat": "selective"}),
        ("normed", "dualpipe", (2, 2, 2), RING | {"zero_stage": 2, "remat": "full"}),
        ("windowed", "interleaved_1f1b", (2, 4, 1), RING | {"loss_chunks": 2}),
        ("packed", "zb_h1", (2, 4, 1), RING | {"cp": 4, "zero_stage": 2}),
        ("packed_windowed", "1f1b", (2, 2, 2), RING | {"sequence": True, "remat": "full"}),
        ("one_kv", "1f1b", (2, 4, 1), ULYSSES | {"cp": 4, "zero_stage": 3}),
        ("grouped", "zb_h1", (2, 2, 2), ULYSSES | {"sequence": True, "remat": "selective"}),
        ("normed", "dualpipe", (2, 4, 1), ULYSSES | {"cp": 4, "zero_stage": 2, "remat": "full"}),
        ("packed_windowed", "interleaved_1f1b", (2, 4, 1), ULYSSES | {"loss_chunks": 2}),
        ("grouped", "zb_h1", (2, 4, 1), ULYSSES | {"slices": 2, "poison_bubbles": True}),
        ("packed", "1f1b", (2, 2, 2), ULYSSES | {"slices": 4, "remat": "full"}),
    ],
    ids=str,
)  # fmt: skip
def test_on_whole_meshes(model, schedule, mesh, how):
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, dtype=jnp.float64, **how))


@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("zb_h1", (2, 2, 2), RING | {"sequence": True, "remat": "selective"}),
        ("interleaved_1f1b", (2, 4, 1), RING | {"cp": 4, "zero_stage": 3, "remat": "full"}),
        ("dualpipe", (2, 4, 1), RING | {"zero_stage": 2}),
        ("1f1b", (2, 4, 1), ULYSSES | {"remat": "full", "slices": 2}),
        ("zb_h1", (2, 1, 1), {"slices": 4, "remat": "selective"}),
    ],
    ids=str,
)
def test_the_fused_kernel_on_whole_meshes(schedule, mesh, how, monkeypatch):
    """All but cuDNN itself, whose part plain products play."""
    fused.stands_in(monkeypatch)
    with jax.enable_x64(True):
        assert_same(*run("fused", schedule, *mesh, dtype=jnp.float64, **how))
