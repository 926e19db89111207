"""Embedding, head and loss on meshes: vocabulary-parallel over pp, and the z-loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.sharding import NamedSharding
from mesh_models import SIZES
from meshes import pipeline_of, run, wanted
from programs import eqns_of, executed_flops

from jaxpipe.core.schedule import Lockstep

SHARED = Lockstep(vocab_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        *((name, (2, 2, 2)) for name in ("1f1b", "zb_h1", "interleaved_1f1b", "zbv", "dualpipe")),
        ("zbv", (4, 1, 2)),
        ("dualpipe", (2, 1, 4)),
        ("dualpipe", (2, 4, 1)),
        ("zb_h1", (2, 4, 1)),
    ],
    ids=str,
)
def test_all_ranks_share_the_vocabulary(schedule, mesh):
    """With NaN in free slots; one mesh has ZeRO stage 2, one 0."""
    lockstep = Lockstep(transfer_ticks=1 + (mesh[0] == 2), vocab_parallel=True)
    with jax.enable_x64(True):
        got, want = run(
                "deep", schedule, *mesh, sequence=mesh[2] > 1, loss_chunks=mesh[2],
                dtype=jnp.float64, lockstep=lockstep, zero_stage=2 * (mesh[2] > 1),
                poison_bubbles=True,
        )  # fmt: skip
        assert_same(got, want)


@pytest.mark.extended
@pytest.mark.slow(unless=["zb_h1-*"])
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("1f1b", (2, 2, 2), {"sequence": True, "loss_chunks": 2}),
        ("zb_h1", (2, 1, 4), {"lockstep": Lockstep(defer_embed_head=True)}),
        ("dualpipe", (2, 2, 2), {"lockstep": SHARED, "loss_chunks": 4}),
        ("interleaved_1f1b", (2, 2, 1), {"slices": 2}),
    ],
    ids=str,
)
def test_a_second_loss_of_the_head(schedule, mesh, how):
    """Against log(Z)^2 on one device, which tests/model compares with its formula."""
    with jax.enable_x64(True):
        (losses, got), (want_losses, want) = run(
            "deep", schedule, *mesh, z_loss=0.1, dtype=jnp.float64, poison_bubbles=True, **how
        )
        assert losses.shape == (8, 2)
        assert_same((losses[:, 0], losses[:, 1], got), (want_losses[:, 0], want_losses[:, 1], want))


@pytest.mark.slow(unless=["3"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_shared_vocabulary_with_few_microbatches_in_flight(zero_stage):
    """With a head that is not tied to the embedding."""
    lockstep = Lockstep(in_flight=4, vocab_parallel=True)
    how = {"lockstep": lockstep, "zero_stage": zero_stage, "poison_bubbles": True}
    with jax.enable_x64(True):
        assert_same(*run("grouped", "1f1b", 2, 2, 2, dtype=jnp.float64, **how))


@pytest.mark.slow(only=["zbv"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_no_rank_has_a_whole_vocabulary(schedule):
    """Stored, gathered, summed or multiplied: no array of the program is as long as it."""
    pipeline, _, params, batch = pipeline_of("deep", schedule, 4, 2, 1, lockstep=SHARED)
    held = jax.tree.map(lambda s, leaf: NamedSharding(pipeline.mesh, s).shard_shape(leaf.shape),
                        pipeline.sharding.partition_specs(params), params)  # fmt: skip
    assert held["embed_head"]["embed"] == (SIZES["vocab_size"] // 4, SIZES["d_model"])
    trace = jax.make_jaxpr(pipeline.losses_and_gradients)(params, batch)
    (inside,) = [eqn for eqn, _ in eqns_of(trace.jaxpr) if eqn.primitive.name == "shard_map"]
    for eqn, _ in eqns_of(inside.params["jaxpr"]):
        for value in eqn.outvars:
            assert SIZES["vocab_size"] not in value.aval.shape, eqn


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "dualpipe"])
def test_a_shared_vocabulary_gives_every_rank_the_same_work(schedule):
    """Each rank has equal matmul FLOPs, and together they have those of one device."""
    pipeline, _, params, batch = pipeline_of("deep", schedule, 4, 1, 1, lockstep=SHARED)
    tables = pipeline.tables
    trace = jax.jit(pipeline.losses_and_gradients).trace(params, batch)
    of_ranks = {executed_flops(trace, tables, rank) for rank in range(4)}
    alone, _, params, batch = pipeline_of("deep", "1f1b", 1, 1, 1)
    trace = jax.jit(alone.losses_and_gradients).trace(params, batch)
    assert of_ranks == {executed_flops(trace, alone.tables, 0) / 4}


def test_forward_only_with_a_shared_vocabulary():
    pipeline, _, params, batch = pipeline_of(
        "tied", "dualpipe", 2, 2, 2, sequence=True, lockstep=SHARED
    )
    losses = jax.jit(pipeline.losses)(params, batch)
    np.testing.assert_allclose(losses, wanted("tied", jnp.float32)[0], rtol=1e-6, atol=1e-9)
