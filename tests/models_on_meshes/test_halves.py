"""Layers that run on halves of rows or sequences, against one device: losses and gradients."""

from itertools import product

import jax
import jax.numpy as jnp
import mixtures
import pytest
from compare import assert_same
from meshes import run

OF_SEQUENCE = {"halves": "sequence"}
SCHEDULES, REMAT = ("1f1b", "zb_h1", "zbv", "dualpipev"), ("none", "selective", "full")


def check(*args, halves="rows", **how):
    with jax.enable_x64(True):
        how |= {"poison_bubbles": True, "overlap_halves": halves}
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.extended(unless=["1f1b-full-packed"])
@pytest.mark.slow(unless=["1f1b-full-packed", "zb_h1-selective-grouped"])
@pytest.mark.parametrize(
    ("schedule", "remat", "model"), [*product(SCHEDULES, REMAT, ("grouped", "packed"))]
)
def test_halves_with_shared_layers(schedule, remat, model):
    check(model, schedule, 2, 1, 2, sequence=model == "grouped", remat=remat)


@pytest.mark.extended
@pytest.mark.slow(unless=["1f1b-full-*"])
@pytest.mark.parametrize(
    ("schedule", "remat", "halves"), [*product(SCHEDULES, REMAT, ("rows", "sequence"))]
)
def test_halves_with_shared_experts(schedule, remat, halves):
    how = {"remat": remat, "overlap_halves": halves, "poison_bubbles": True}
    assert_same(*mixtures.run("deepseek", schedule, 2, 2, 1, 2, **how))


@pytest.mark.extended
@pytest.mark.slow(unless=["slices", "of a sequence without its shards"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("packed", "1f1b", (2, 2, 2), {"cp": 2, "slices": 2, "remat": "full"}),
        ("one_kv", "zb_h1", (2, 2, 2), {"zero_stage": 3, "reshard_after_forward": True}),
        ("packed_mixture_ahead", "1f1b", (2, 2, 1), {"ep": 2, "remat": "selective"}),
        ("tied", "zb_h1", (2, 1, 2), OF_SEQUENCE | {"remat": "selective"}),
        (
            "one_kv",
            "zb_h1",
            (2, 2, 2),
            OF_SEQUENCE | {"zero_stage": 3, "reshard_after_forward": True, "sequence": True},
        ),
        ("packed_latent", "1f1b", (2, 1, 2), OF_SEQUENCE | {"remat": "full", "sequence": True}),
        ("windowed", "1f1b", (2, 1, 2), OF_SEQUENCE | {"remat": "ahead", "sequence": True}),
        ("packed_qwen3_next", "1f1b", (2, 2, 1), {"cp": 2, "slices": 2}),
        ("qwen3_next", "zb_h1", (2, 1, 2), OF_SEQUENCE | {"remat": "selective", "sequence": True}),
        ("packed_qwen3_next", "zbv", (2, 1, 2), OF_SEQUENCE),
        ("packed_kimi_linear", "1f1b", (2, 2, 1), {"ep": 2, "slices": 2, "remat": "full"}),
        ("packed_kimi_linear", "zb_h1", (2, 1, 2), OF_SEQUENCE | {"sequence": True}),
        ("packed_nemotron_h", "zb_h1", (2, 2, 1), {"ep": 2, "slices": 2, "remat": "selective"}),
        ("nemotron_h", "zbv", (2, 1, 2), OF_SEQUENCE | {"remat": "ahead", "sequence": True}),
    ],
    ids=[
        "slices",
        "gathered in every action",
        "reading embedding and head",
        "of a sequence without its shards",
        "of a sequence, gathered in every action",
        "of latents of a sequence",
        "of a sequence, recomputed ahead",
        "states of shards of slices",
        "states of a sequence",
        "states of packed documents",
        "Kimi delta attention of slices",
        "Kimi delta attention of a sequence",
        "Mamba-2 of slices, and layers without a state",
        "Mamba-2 of a sequence",
    ],
)
def test_halves_with_other_mechanisms(model, schedule, mesh, how):
    check(model, schedule, *mesh, **how)


@pytest.mark.extended(unless=["1f1b-full-packed"])
@pytest.mark.slow(unless=["1f1b-full-packed", "zb_h1-selective-grouped", "zbv-none-packed"])
@pytest.mark.parametrize(
    ("schedule", "remat", "model"), [*product(SCHEDULES, REMAT, ("grouped", "packed"))]
)
def test_halves_of_one_sequence_with_shared_layers(schedule, remat, model):
    how = {"halves": "sequence", "examples": 1, "remat": remat}
    check(model, schedule, 2, 1, 2, sequence=True, **how)
