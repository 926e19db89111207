"""Parameters that dp divides along no axis: stored in padded shards, with no other effect."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import SMALL
from compare import assert_same, relative
from jax.sharding import PartitionSpec
from meshes import pipeline_of, problem, run
from training_runs import keyed, keying, train_on_random_tokens

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore
from jaxpipe.core.contract.parameter import ParamSpec, plan_sharding
from jaxpipe.core.mesh import DP, PP, TP
from jaxpipe.core.schedule import Lockstep
from jaxpipe.planning import Hardware, analytic, estimates
from jaxpipe.training.trainer import Trainer

ODD = ("model.n_layers=4", "model.d_model=64", "model.d_ff=80", "train.seq_len=8",
       "train.grad_accum_steps=4", "optimizer.eps=1e-2")  # fmt: skip
MESHES = {  # all with batches of 6 sequences, except that of five replicas, which does not train
    "stages": ("parallel.pp=2", "parallel.dp=3", "train.microbatch_size=2"),
    "resharded": ("parallel.pp=1", "parallel.dp=3", "parallel.tp=2", "parallel.zero_stage=3",
                  "parallel.reshard_after_forward=true", "train.microbatch_size=2"),
    "v_shape": ("parallel.pp=2", "parallel.dp=3", "parallel.schedule=zbv",
                "train.microbatch_size=2"),
    "other": ("parallel.pp=2", "parallel.dp=2", "train.microbatch_size=3"),
    "five": ("parallel.pp=1", "parallel.dp=5"),
    "alone": ("parallel.pp=1", "parallel.dp=1", "train.microbatch_size=6"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "dp", "part", "padding"),
    [(1, 3, 1, 0), (31, 3, 31, 0), (32, 3, 32, 0), (33, 3, 11, 0), (64, 3, 32, 32),
     (64, 5, 32, 96), (97, 3, 97, 0), (128, 3, 64, 64), (4096, 6, 704, 128), (14336, 6, 2400, 64)],
)  # fmt: skip
def test_parts_are_whole_blocks_of_32(size, dp, part, padding):
    """Unless dp divides the axis, or it has no blocks, or a shard would be as large as the axis."""
    mesh = {"pp": 1, "dp": dp, "tp": 1}
    how = plan_sharding((1, size), ParamSpec(shape=(size,)), mesh, is_layer=True, zero_stage=1)
    assert (how.shard_size((1, size), mesh), how.padding) == (part, (0, padding))
    assert how.shard_size((1, size), mesh, gathered=("dp",)) == size


def test_the_axis_that_needs_least_is_padded():
    mesh = {"pp": 2, "dp": 3, "tp": 2}

    def names(shape, *cuts, of_layer):
        leaf = ParamSpec(cuts, shape=shape[of_layer:])
        return plan_sharding(shape, leaf, mesh, is_layer=of_layer, zero_stage=1).dim_axes

    assert names((2, 64, 160), of_layer=True) == (("pp",), (), ("dp",))
    assert names((2, 64, 80), of_layer=True) == (("pp",), ("dp",), ())
    assert names((2, 64, 80), ("tp", 1), of_layer=True) == (("pp",), ("dp",), ("tp",))
    assert names((40, 64), ("tp", 0), of_layer=False) == (("tp", "pp"), ("dp",))
    assert names((64,), of_layer=False) == (("pp",),)  # nothing else is left to shard


def test_what_is_gathered_has_no_padding():
    """And its shards, all-gathered again, are the same."""
    pipeline, layout, params, _ = pipeline_of("odd", "1f1b", 1, 3, 2, examples=6, zero_stage=1)
    _, shared, layers, _ = problem("odd", jnp.float32)
    true = {"embed_head": shared, "layers": layout.stack(layers)}
    stored, specs = (
        pipeline.sharding.param_shardings(params),
        pipeline.sharding.partition_specs(params),
    )
    assert any(any(leaf.padding) for leaf in jax.tree.leaves(stored))

    def gathered_twice(parts):
        every = {TP, PP, DP}
        once = jax.tree.map(lambda s, part: s.gather(part, every), stored, parts)
        again = jax.tree.map(lambda s, leaf: s.gather(s.shard(leaf, {DP}), {DP}), stored, once)
        return once, again

    run = jax.shard_map(
        gathered_twice, mesh=pipeline.mesh, in_specs=(specs,), out_specs=PartitionSpec(),
        check_vma=False,
    )  # fmt: skip
    for got in jax.jit(run)(params):
        chex.assert_trees_all_equal(got, true)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "zero_stage"),
    [("1f1b", 1), ("zb_h1", 2), ("interleaved_1f1b", 3), ("dualpipe", 1), ("dualpipe", 3)],
)
def test_gradients_of_padded_leaves(schedule, zero_stage):
    """Equal to one device's, and zero in the padding, as `run` pads the expected values."""
    how = {"zero_stage": zero_stage, "reshard_after_forward": zero_stage == 3}
    with jax.enable_x64(True):
        got, want = run("odd", schedule, 2, 3, 1, examples=6, dtype=jnp.float64, **how)
        assert_same(got, want)


@pytest.mark.parametrize("how", [{"sequence": True}, {"reshard_after_forward": True}])
def test_padding_beside_tensor_parallelism(how):
    with jax.enable_x64(True):
        assert_same(
            *run("odd", "1f1b", 1, 3, 2, examples=6, dtype=jnp.float64, zero_stage=3, **how)
        )


def test_padding_beside_a_shared_vocabulary():
    how = {"zero_stage": 2, "lockstep": Lockstep(vocab_parallel=True)}
    with jax.enable_x64(True):
        assert_same(*run("odd", "1f1b", 2, 3, 1, examples=6, dtype=jnp.float64, **how))


def trained(trainer, state, steps):
    return train_on_random_tokens(trainer, state, steps, vocab_size=256, shape=(4, 6, 9))


def trainer_of(mesh, *overrides):
    config = configs.load(SMALL, [*ODD, *MESHES[mesh], *overrides])
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "optimizer"), [("stages", "muon"), ("resharded", "adamw"), ("v_shape", "lion")]
)
def test_training_is_that_of_one_device(mesh, optimizer):
    one, other = (trainer_of(name, f"optimizer.name={optimizer}") for name in ("alone", mesh))
    start = other.init()
    chex.assert_trees_all_equal(keyed(other, start), keyed(one, one.init()))
    want, losses = trained(one, one.init(), range(3))
    got, found = trained(other, start, range(3))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    errors = jax.tree.map(relative, keyed(other, got)["params"], keyed(one, want)["params"])
    # Muon makes full-sized updates from rounding where a gradient is nearly zero.
    assert max(jax.tree.leaves(errors)) <= (1e-5 if optimizer == "muon" else 1e-6), errors
    stored = other.sharding.param_shardings(got.params)
    for how, leaf in zip(*map(jax.tree.leaves, (stored, got.params))):
        shape = how.unpadded_shape(leaf.shape)
        for axis, size in enumerate(shape):
            assert not np.asarray(leaf).take(range(size, leaf.shape[axis]), axis).any()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "optimizer"), [("stages", "adamw"), ("resharded", "muon")])
def test_padded_bytes_are_planned(mesh, optimizer):
    trainer = trainer_of(mesh, f"optimizer.name={optimizer}")
    seconds = analytic(trainer.config, Hardware())
    found, _ = estimates(trainer.config, seconds)
    planned = next(each for each in found if each.label == "1f1b").bytes
    state, _ = trained(trainer, trainer.init(), range(1))
    first = jax.devices()[0]

    def held(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size > 16]  # counters are smaller
        return sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    assert planned.parameters == held(state.params)
    assert planned.optimizer == held(state.optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    trainer, directory = trainer_of("stages"), tmp_path_factory.mktemp("padded")
    state, _ = trained(trainer, trainer.init(), range(2))
    with CheckpointStore(
        directory, keep=1, asynchronous=True, keying=keying(trainer)
    ) as checkpoints:
        checkpoints.save(2, state.parts(), {})
    want = keyed(trainer, state)
    _, losses = trained(trainer, state, [2])
    return directory, want, losses


def test_padding_is_not_on_disk(saved):
    """Read by Orbax alone, a checkpoint has the shapes and values of one device."""
    directory, want, _ = saved
    handler, path = ocp.PyTreeCheckpointHandler(), directory / "2" / "state"
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree
    )
    plain = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    chex.assert_trees_all_equal(plain["params"], want["params"])
    alone = trainer_of("alone")
    shapes = keying(alone).keyed_shapes({"params": alone.state_shapes.params})["params"]
    chex.assert_trees_all_equal_shapes(plain["params"], shapes)


@pytest.mark.slow(unless=["alone"])
@pytest.mark.parametrize("mesh", ["stages", "resharded", "v_shape", "other", "alone"])
def test_a_padded_checkpoint_restores_anywhere(saved, mesh):
    directory, want, losses = saved
    trainer = trainer_of(mesh)
    how = {"keep": 1, "asynchronous": True, "keying": keying(trainer)}
    with CheckpointStore(directory, **how) as checkpoints:
        restored, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    state = trainer.state_of(restored)
    chex.assert_trees_all_equal(keyed(trainer, state), want)
    _, again = trained(trainer, state, [2])
    np.testing.assert_allclose(again, losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["other", "alone"])
def test_any_checkpoint_restores_padded(tmp_path, mesh):
    before, after = trainer_of(mesh), trainer_of("resharded")
    state, _ = trained(before, before.init(), range(1))
    with CheckpointStore(
        tmp_path, keep=1, asynchronous=False, keying=keying(before)
    ) as checkpoints:
        checkpoints.save(1, state.parts(), {})
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying(after)) as checkpoints:
        restored, _ = checkpoints.restore(after.state_shapes.parts(), say=pytest.fail)
    chex.assert_trees_all_equal(keyed(after, after.state_of(restored)), keyed(before, state))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_some_replicas_may_hold_nothing_but_padding(tmp_path, asynchronous):
    """Of 64 rows, 5 replicas have 32, 32, 0, 0 and 0."""
    before, after = trainer_of("five"), trainer_of("other")
    how = {"keep": 1, "asynchronous": asynchronous}
    state = before.init()
    with CheckpointStore(tmp_path, **how, keying=keying(before)) as checkpoints:
        checkpoints.save(0, state.parts(), {})
    for trainer in (before, after):
        with CheckpointStore(tmp_path, **how, keying=keying(trainer)) as checkpoints:
            restored, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
        chex.assert_trees_all_equal(
            keyed(trainer, trainer.state_of(restored)), keyed(after, after.init())
        )
