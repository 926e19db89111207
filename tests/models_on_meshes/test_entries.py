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
        ("zb_h1", (4, 2, 1), {"cp": 2, "remat": "selective", "poison_bubbles": True}),
        ("interleaved_zb", (2, 1, 1), {"slices": 2, "remat": "full"}),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(schedule, mesh, how):
    with jax.enable_x64(True):
        assert_same(*run("entries", schedule, *mesh, dtype=jnp.float64, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("zb_h1", (2, 2, 1), {"cp": 2, "slices": 2, "remat": "full"}),
        (
            "interleaved_1f1b", (2, 2, 2),
            {"cp": 2, "slices": 2, "sequence": True, "ep": 2, "zero_stage": 3,
             "remat": "selective"},
        ),
        ("1f1b", (4, 1, 1), {"slices": 4, "remat": "none", "poison_bubbles": True}),
        ("1f1b", (2, 1, 2), {"overlap_halves": "sequence", "sequence": True}),
    ],
    ids=str,
)  # fmt: skip
def test_documents_on_meshes_are_each_alone(schedule, mesh, how):
    """Shards and slices of two or four tokens."""
    with jax.enable_x64(True):
        assert_same(*run("packed_entries", schedule, *mesh, dtype=jnp.float64, **how))
