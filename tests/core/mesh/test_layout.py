"""Placement: mesh coordinates, layer stacking, specs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.core.mesh import RP, ReplicaFactors, StageLayout, make_mesh


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 1, 2), (1, 8, 1), (8, 1, 1)])
def test_device_order(pp, dp, tp):
    mesh = make_mesh(pp, dp, tp)
    for index, device in enumerate(jax.devices()):
        coordinate = (index // (dp * tp), index // tp % dp, index % tp)
        assert mesh.devices.reshape(pp, dp, tp)[coordinate] == device


def test_mesh_needs_all_devices():
    with pytest.raises(ValueError, match="pp=3 x dp=2 x tp=1 needs 6 devices, got 8"):
        make_mesh(3, 2)


@pytest.mark.parametrize("numpy", [np, jnp])
@pytest.mark.parametrize("counts", [(4,), (2, 2), (3, 1), (1, 3, 2), (2, 1, 1, 2)])
def test_stack_and_unstack(counts, numpy):
    layout = StageLayout(counts)
    layers = [{"w": numpy.full((2, 3), 1 + i)} for i in range(layout.layers)]
    slots = layout.stack(layers)
    assert all(isinstance(slot["w"], type(layers[0]["w"])) for slot in slots)
    assert len(slots) == len(layout.slot_kinds) == max(counts)
    assert slots[0]["w"].shape == (len(counts), 2, 3)
    jax.tree.map(np.testing.assert_array_equal, layout.unstack(slots), layers)
    padded = sum(int((slot["w"][rank] == 0).all()) for slot in slots for rank in range(len(counts)))
    assert padded == max(counts) * len(counts) - layout.layers


def test_every_layer_slot_holds_a_layer():
    """Merging the stages' kinds two at a time leaves slots that no stage uses (Gemma 3 4B too)."""
    layout = StageLayout((2, 1, 3), kinds=tuple("aabbaa"))
    assert layout.slot_kinds == ("b", "a", "a")
    layers = [{kind: jnp.full(2, 1 + i)} for i, kind in enumerate(layout.kinds)]
    jax.tree.map(np.testing.assert_array_equal, layout.unstack(layout.stack(layers)), layers)
    gemma = tuple("global" if (i + 1) % 6 == 0 else "local" for i in range(34))
    layout = StageLayout((8, 8, 9, 9), kinds=gemma)
    assert all(any(layer is not None for layer in slot) for slot in zip(*layout.layer_table))


@pytest.mark.parametrize("pipeline_first", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2), (1, 4, 2), (2, 4, 1), (8, 1, 1)])
def test_rank_arithmetic_of_the_mesh(sizes, pipeline_first):
    """Fast-LLM's formulas: tp varies fastest, then dp, or pp if it comes first."""
    pp, dp, tp = sizes
    mesh = make_mesh(pp, dp, tp, pipeline_first=pipeline_first)
    assert mesh.axis_names == ("pp", "rp", "dp", "ep", "tp")
    for place, device in np.ndenumerate(mesh.devices.reshape(sizes)):
        rank = device.id
        if pipeline_first:
            assert place == ((rank // tp) % pp, (rank // tp) // pp, rank % tp)
        else:
            assert place == (rank // (tp * dp), (rank // tp) % dp, rank % tp)


def test_replicas_of_a_group_are_neighbours():
    mesh = make_mesh(1, 8, 1, factors=ReplicaFactors(rp=2))
    assert mesh.shape[RP] == 2
    assert [device.id for device in mesh.devices[0, 0].flat] == [0, 1, 2, 3]
