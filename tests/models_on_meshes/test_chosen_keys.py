"""Attention to chosen keys on meshes, against one device, in float64.

Against transformers and PyTorch it is compared in `tests/outside`.
"""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run


def check(*args, **how):
    with jax.enable_x64(True):
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("packed_indexed", "1f1b", (2, 1, 2), {"sequence": True, "remat": "full"}),
        ("packed_indexed", "zb_h1", (2, 2, 1), {"cp": 2, "slices": 2, "remat": "selective"}),
        ("packed_indexed", "zb_h1", (2, 2, 2), {"ep": 2, "remat": "ahead"}),
        ("indexed", "dualpipe", (2, 2, 2), {"cp": 2, "remat": "full", "poison_bubbles": True}),
        ("indexed", "interleaved_1f1b", (2, 1, 4), {"sequence": True, "slices": 2}),
        ("indexed", "zbv", (2, 2, 1), {"zero_stage": 3}),
        (  # a loop over three layers, beside one and a prediction that one rank has each
            "packed_indexed_deep", "1f1b", (2, 2, 1),
            {"unroll_layers": 1, "cp": 2, "slices": 2, "remat": "full", "poison_bubbles": True},
        ),
        ("shared_index", "zb_h1", (2, 1, 2), {"sequence": True, "slices": 2, "remat": "full"}),
        (
            "packed_shared_index", "1f1b", (2, 2, 2),
            {"cp": 2, "slices": 2, "ep": 2, "sequence": True, "zero_stage": 3,
             "remat": "selective", "poison_bubbles": True},
        ),
        ("packed_shared_index", "zb_h1", (4, 2, 1), {"ep": 2, "remat": "ahead"}),
        ("shared_index", "dualpipev", (2, 2, 1), {"cp": 2, "zero_stage": 2}),
        ("shared_warming", "zb_h1", (2, 1, 2), {"slices": 2, "remat": "full"}),
        ("warming", "zb_h1", (2, 2, 2), {"cp": 2, "slices": 2, "remat": "full"}),
        ("warming", "1f1b", (2, 2, 1), {"zero_stage": 3, "remat": "selective"}),
    ],
    ids=str,
)  # fmt: skip
def test_chosen_keys_of_every_device_and_slice(model, schedule, mesh, how):
    check(model, schedule, *mesh, **how)
