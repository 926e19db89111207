"""Optimizer moments offloaded to host memory: bitwise equal, and on the host after every step.

On CPUs both memories are the same, so the tests check the memory kind that jax reports.
"""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, losses
from routed import restored, run, trainer_of

from jaxpipe import config as configs
from jaxpipe import optimizer as optimizers
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.core.jax_internals import used_inputs
from jaxpipe.core.mesh import is_stage_stacked, stage_stacked_trees
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.planning import Devices, arrange
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.training.offloaded_moments import fetched, returned, update_in_turn
from jaxpipe.training.trainer import Trainer

SIZES = ["parallel.pp=2", "parallel.dp=1", "model.n_layers=2"]
AWAY = "train.offload_moments=true"


def memories(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def update_at_once(update, gradients, moments, params, updates):
    held, updates = fetched(moments, updates)
    params, after = update(gradients, held, params, updates)
    return params, returned(after)


@pytest.mark.slow(unless=["adafactor-lora*", "adamw-parallel*", "muon-parallel*"])
@pytest.mark.parametrize("more", ["parallel.unroll_layers=2", "lora.rank=2"])
@pytest.mark.parametrize("name", [*optimizers.KINDS])
def test_groups_in_turn_give_the_update_of_all_at_once(name, more):
    """Bit for bit, with frozen parameters too, and where the step makes no update."""
    how = [*SIZES, f"optimizer.name={name}", more, AWAY]
    trainer = Trainer.resolve(configs.load(SMALL, how), tuple(jax.devices()[:2]))
    state, draw = trainer.init(), np.random.default_rng(0).normal
    flags = is_trained(trainer.sharding.param_shardings(state.params))
    trained, apply = select(flags, state.params), partial(optimizers.apply, trainer.optimizer)
    at_once, in_turn = (
        jax.jit(partial(update, apply)) for update in (update_at_once, update_in_turn)
    )
    want = got = (state.params, state.optimizer)
    for updates in (True, True, False):
        gradients = jax.tree.map(lambda leaf: jnp.float32(draw(size=leaf.shape)), trained)
        want, got = (
            update(gradients, moments, params, jnp.bool(updates))
            for update, (params, moments) in ((at_once, want), (in_turn, got))
        )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_moments_wait_until_those_of_the_group_before_have_returned():
    """Each of five parameters is a group. Here what returns is the parameter itself."""
    tree = {"embed_head": {}, "layers": tuple({"w": jnp.ones(3)} for _ in range(5))}
    update = lambda gradients, held, params, updates: (held["mu"], {"mu": params})  # noqa: E731
    jaxpr = jax.make_jaxpr(partial(update_in_turn, update, tree))({"mu": tree}, tree, True)
    for group in range(5):  # whose moments, once fetched, are the first outputs
        used = used_inputs(jaxpr, [group == other for other in range(5)] + [False] * 5)
        assert used[5:10] == [other == group - 1 for other in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "adamw", "lion", "muon", "schedule_free"])
def test_a_step_leaves_moments_where_they_were(name):
    """All other state stays on the device, and all bits equal those of a state entirely there."""
    how = [*SIZES, f"optimizer.name={name}", "optimizer.decay=constant"]
    batch = {key: np.ones((4, 1, 32), np.int32) for key in ("inputs", "targets")}
    made = {}
    for away in (False, True):
        config = configs.load(SMALL, [*how, AWAY] if away else how)
        trainer = Trainer.resolve(config, tuple(jax.devices()[:2]))
        state = trainer.init()
        for _ in range(2):
            state, _ = trainer.train_step(state, trainer.put(batch))
            assert trainer.train_step._cache_size() == 1
        nodes = jax.tree.leaves(state.optimizer, is_leaf=is_stage_stacked)
        moments = [node for node in nodes if is_stage_stacked(node)]
        rest = [node for node in nodes if not is_stage_stacked(node)]
        assert memories(moments) == {"pinned_host" if away else "device"}
        assert memories([rest, state.params, state.step]) == {"device"}
        made[away] = jax.tree.map(np.asarray, state), trainer.eval_step(state, trainer.put(batch))
    jax.tree.map(np.testing.assert_array_equal, made[True], made[False])


def test_a_new_state_and_a_restored_one_have_them_there(tmp_path):
    """By the program, too: without a copy in it XLA counts its results as the device's memory."""
    trainer = Trainer.resolve(configs.load(SMALL, [*SIZES, AWAY]), tuple(jax.devices()[:2]))
    traced = jax.make_jaxpr(trainer.unplaced, return_shape=True)(trainer.state_shapes.params)
    spaces = [aval.memory_space for aval in traced[0].out_avals]
    nodes = jax.tree.unflatten(jax.tree.structure(traced[1]), spaces).optimizer
    assert {*jax.tree.leaves(stage_stacked_trees(nodes))} == {jax.memory.Space.Host}
    keying, state = StateKeying(trainer.layout, trainer.sharding), trainer.init()
    assert memories(keying.to_padded_keyed(state)) == {"device"}  # as it is written
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying) as checkpoints:
        checkpoints.save(0, state, {})
        parts, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    assert memories(stage_stacked_trees(parts["optimizer"])) == {"pinned_host"}
    assert memories(parts["params"]) == {"device"}


@pytest.mark.slow
def test_a_run_goes_on_with_its_moments_elsewhere(tmp_path):
    """From the device to the host and back, each time bit for bit."""
    how = ["parallel.pp=2", "train.steps=6", "checkpoint.every=3"]
    everything, away = trainer_of(*how), trainer_of(*how, AWAY)
    for name, trainer in (("all", everything), ("away", away)):
        assert run(trainer, tmp_path / name) == 0
    for name, other in (("all", away), ("away", everything)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-cut")
        shutil.rmtree(tmp_path / f"{name}-cut" / "checkpoints" / "6")
        assert run(other, tmp_path / f"{name}-cut") == 0
    want, _ = restored(everything, tmp_path / "all")
    for name in ("away", "all-cut", "away-cut"):
        assert losses(tmp_path / name) == losses(tmp_path / "all")
        jax.tree.map(np.testing.assert_array_equal, restored(away, tmp_path / name)[0], want)


def test_a_plan_counts_them_on_the_host():
    counted = []
    for more in ([], [AWAY]):
        config = configs.load(SMALL, [*SIZES, *more])
        plan = arrange(config, Devices())
        layout = Trainer.resolve(config, tuple(jax.devices()[:2])).layout
        counted.append(rank_bytes(config, layout, plan.buffers))
    everything, away = counted
    assert (away.optimizer, away.host) == (0, everything.optimizer)
    assert everything.total - away.total == everything.optimizer == 2 * everything.parameters
