"""Context parallelism by every method on meshes, against one device."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run
from oracles import fused

from jaxpipe.core.split import POLICIES

RING, ULYSSES, BOTH = {"cp": 2, "heads": 1}, {"cp": 2, "heads": 2}, {"cp": 4, "heads": 2}
RING_OF_4, ULYSSES_OF_4 = {"cp": 4, "heads": 1}, {"cp": 4, "heads": 4}
GATHER, GATHER_OF_4 = {"cp": 2}, {"cp": 4}
SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "dualpipe")


@pytest.mark.slow(unless=["packed-1f1b-*'heads': 2*", "grouped-zb_h1-*'cp': 4*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("one_kv", "1f1b", (2, 4, 1), RING_OF_4 | {"zero_stage": 3}),
        ("normed", "dualpipe", (2, 2, 2), RING | {"zero_stage": 2, "remat": "full"}),
        ("windowed", "interleaved_1f1b", (2, 4, 1), RING | {"loss_chunks": 2}),
        ("packed_windowed", "1f1b", (2, 2, 2), RING | {"sequence": True, "remat": "full"}),
        ("one_kv", "1f1b", (2, 4, 1), ULYSSES_OF_4 | {"zero_stage": 3}),
        ("packed_windowed", "interleaved_1f1b", (2, 4, 1), ULYSSES | {"loss_chunks": 2}),
        ("grouped", "zb_h1", (2, 4, 1), ULYSSES | {"slices": 2, "poison_bubbles": True}),
        ("packed", "1f1b", (2, 2, 2), ULYSSES | {"slices": 4, "remat": "full"}),
        ("one_kv", "interleaved_1f1b", (2, 4, 1), BOTH | {"zero_stage": 3}),
        ("packed_windowed", "zb_h1", (2, 4, 1), BOTH | {"remat": "selective"}),
        ("grouped", "1f1b", (1, 4, 2), BOTH | {"sequence": True, "loss_chunks": 2}),
        ("grouped", "zb_h1", (2, 4, 1), BOTH | {"slices": 2, "poison_bubbles": True}),
        ("windowed", "1f1b", (2, 2, 2), RING | {"slices": 2, "remat": "full"}),
    ],
    ids=str,
)  # fmt: skip
def test_on_whole_meshes(model, schedule, mesh, how):
    """Layers and combinations with a method that the product below does not have."""
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, dtype=jnp.float64, **how))


def cases():
    """Yield every method under every schedule; features that combine with them alternate."""
    ways = RING, ULYSSES, BOTH, GATHER, RING_OF_4, ULYSSES_OF_4, GATHER_OF_4
    for (w, way), (s, schedule) in product(enumerate(ways), enumerate(SCHEDULES)):
        turn = w + s
        how = way | {"zero_stage": 2 + (s + w // 2) % 2, "remat": list(POLICIES)[turn % 3]}
        if way["cp"] == 2:
            how["sequence"] = turn % 2 == 0
        if schedule != "dualpipe" and way != RING_OF_4 and turn % 4 > 1:
            how["slices"] = 2
        model = "packed" if (s // 2 + w) % 2 else "grouped"
        yield model, schedule, (2, 2, 2) if way["cp"] == 2 else (2, 4, 1), how


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "mesh", "how"), [*cases()], ids=str)
def test_every_method_under_every_schedule(model, schedule, mesh, how):
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, dtype=jnp.float64, **how))


@pytest.mark.extended
@pytest.mark.slow(unless=["zb_h1-*"])
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("zb_h1", (2, 2, 2), RING | {"sequence": True, "remat": "selective"}),
        ("interleaved_1f1b", (2, 4, 1), RING_OF_4 | {"zero_stage": 3, "remat": "full"}),
        ("dualpipe", (2, 4, 1), RING | {"zero_stage": 2}),
        ("1f1b", (2, 4, 1), ULYSSES | {"remat": "full", "slices": 2}),
        ("1f1b", (2, 4, 1), BOTH | {"remat": "full"}),
        ("interleaved_1f1b", (2, 4, 1), BOTH | {"slices": 2}),
        ("zb_h1", (2, 1, 1), {"slices": 4, "remat": "selective"}),
    ],
    ids=str,
)
def test_the_fused_kernel_on_whole_meshes(schedule, mesh, how, monkeypatch):
    """All but cuDNN itself, which plain products replace."""
    fused.stands_in(monkeypatch)
    with jax.enable_x64(True):
        assert_same(*run("fused", schedule, *mesh, dtype=jnp.float64, **how))
