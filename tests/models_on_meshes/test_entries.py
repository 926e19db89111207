"""DeepSeek-V4's layers on meshes, against one device: copies of the stream, entries, a table."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run


@pytest.mark.slow(unless=["1f1b-*full*"])
@pytest.mark.extended
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("1f1b", (2, 2, 2), {"sequence": True, "remat": "full"}),
        ("zb_h1", (2, 2, 2), {"ep": 2, "zero_stage": 3}),
        ("zbv", (2, 2, 1), {"remat": "selective", "ep": 2}),
        ("dualpipev", (2, 1, 2), {"remat": "ahead", "sequence": True}),
        ("interleaved_1f1b", (2, 2, 1), {"remat": "none", "poison_bubbles": True}),
        ("zb_h1", (4, 1, 1), {"remat": "selective"}),
        ("1f1b", (2, 2, 2), {"ep": 2, "over_tp": True, "sequence": True}),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(schedule, mesh, how):
    with jax.enable_x64(True):
        assert_same(*run("entries", schedule, *mesh, dtype=jnp.float64, **how))
