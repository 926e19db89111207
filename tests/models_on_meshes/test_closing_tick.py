"""A step whose last tick is outside the scan, on whole meshes against one device."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run

from jaxpipe.core.schedule import Lockstep

SHARED = Lockstep(transfer_ticks=2, vocab_parallel=True)


@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("1f1b", (1, 4, 1), {"zero_stage": 1}),
        ("1f1b", (2, 2, 2), {"zero_stage": 2, "lockstep": SHARED}),
        ("interleaved_1f1b", (2, 4, 1), {"zero_stage": 2, "replicate": 2}),
        ("zb_h1", (4, 2, 1), {"zero_stage": 0, "lockstep": Lockstep(defer_embed_head=True)}),
    ],
    ids=str,
)
def test_a_step_is_that_of_one_device(schedule, mesh, how):
    """With NaN in free slots, which ranks read when they compute a gradient that does not count."""
    how = how | {"dtype": jnp.float64, "poison_bubbles": True, "overlap_sums": True}
    with jax.enable_x64(True):
        assert_same(*run("one_kv", schedule, *mesh, sequence=mesh[2] > 1, **how))
