"""Frozen parameters in a run: unchanged bits, no moments, bytes as planned, and checkpoints."""

from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, Tiny

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.mesh import PP
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.model import FAMILIES
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.trainer import Trainer

RUN = """
[model]
family = "tiny"
n_layers = 4
d_model = 24
vocab_size = 64
[parallel]
pp = 2
dp = 2
schedule = "zb_h1"
[train]
steps = 4
grad_accum_steps = 4
microbatch_size = 1
seq_len = 8
compute_dtype = "bfloat16"
[optimizer]
decay = "constant"
[data]
source = "dummy"
"""
ROWS = np.arange(4 * 2 * 9, dtype=np.int32).reshape(4, 2, 9) * 7 % 64
BATCH = {"inputs": ROWS[..., :-1], "targets": ROWS[..., 1:]}


@dataclass(frozen=True)
class FrozenTiny(Tiny):
    """A tiny model whose narrow layers, embedding, and one matrix of wide layers are frozen."""

    @property
    def functions(self):
        frozen, trained = ParamSpec(matrix=(0, 1), trained=False), ParamSpec(matrix=(0, 1))
        specs = {"narrow": {"up": frozen, "down": frozen}, "wide": {"up": frozen, "down": trained}}
        functions = super().functions
        kinds = {
            name: replace(kind, param_specs=specs[name]) for name, kind in functions.kinds.items()
        }
        ends = {"embed": frozen, "head": trained}
        ends = {name: replace(spec, partial_grad_axes=(PP,)) for name, spec in ends.items()}
        return replace(functions, kinds=kinds, embed_head_specs=ends)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, "tiny", replace(TINY, model=f"{__name__}:FrozenTiny"))


@pytest.fixture
def trainer_of(tmp_path):
    path = tmp_path / "frozen.toml"
    path.write_text(RUN)

    def trainer_of(*overrides):
        config = configs.load(path, overrides)
        devices = jax.devices()[: config.parallel.pp * config.parallel.dp]
        return Trainer.resolve(config, tuple(devices))

    return trainer_of


def bytes_on_a_device(shapes, shardings):
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
    return sum(prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in leaves)


def frozen_of(trainer, params):
    trained = is_trained(trainer.sharding.param_shardings(params))
    return select(jax.tree.map(lambda flag: not flag, trained), params)


def numbers(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.slow(unless=["adamw"])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free"])
def test_steps_leave_their_bits(trainer_of, name):
    trainer = trainer_of(f"optimizer.name={name}", "optimizer.weight_decay=0.5")
    state = trainer.init()
    before = numbers(state.params)
    for _ in range(2):
        state, metrics = trainer.train_step(state, trainer.put(BATCH))
    after = numbers(state.params)
    frozen = frozen_of(trainer, after)
    assert len(jax.tree.leaves(frozen)) == 4  # embedding; up and down; up, of two slots a rank
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {jnp.dtype(jnp.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, frozen, frozen_of(trainer, before))
    trained = is_trained(trainer.sharding.param_shardings(after))
    for old, new in zip(*(jax.tree.leaves(select(trained, tree)) for tree in (before, after))):
        assert new.dtype == np.float32
        assert (old != new).any()
    assert np.isfinite(metrics["grad_norm"])
    loss, _ = trainer.eval_step(state, trainer.put(BATCH))
    assert np.isfinite(loss)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bytes_are_those_of_the_plan(trainer_of, zero_stage):
    trainer = trainer_of(f"parallel.zero_stage={zero_stage}")
    shapes, shardings = trainer.state_shapes, trainer.state_shardings
    planned = rank_bytes(trainer.config, trainer.layout, trainer.plan.buffers)
    assert planned.parameters == bytes_on_a_device(shapes.params, shardings.params)
    moments = bytes_on_a_device(shapes.optimizer, shardings.optimizer)
    assert 0 <= moments - planned.optimizer <= 16  # counters
    size, inside, vocabulary = 24, 48, 64
    # float32 sums of the wide layer's second matrix, and of the head
    assert planned.gradients == 4 * (inside * size + vocabulary * size)
    costs = costs_of(trainer.config)
    narrow, wide = costs.kinds["narrow"], costs.kinds["wide"]
    assert narrow.W == narrow.for_w == narrow.stash == 0
    assert narrow.B == narrow.F
    assert wide.W == wide.F / 2


@pytest.mark.parametrize("other", [("parallel.pp=1", "parallel.dp=4", "parallel.schedule=1f1b")])
def test_a_checkpoint_has_them(trainer_of, tmp_path, other):
    """Saved on one mesh and restored on another, bit for bit, in their dtype."""
    first, second = trainer_of(), trainer_of(*other, "train.grad_accum_steps=2")

    def opened(trainer):
        keying = StateKeying(trainer.layout, trainer.sharding)
        return keying, CheckpointStore(tmp_path / "run", keep=1, asynchronous=False, keying=keying)

    state, _ = first.train_step(first.init(), first.put(BATCH))
    keying, checkpoints = opened(first)
    want = numbers(keying.to_keyed(state.parts()))
    with checkpoints:
        checkpoints.save(1, state.parts(), {"position": 8})
    keying, checkpoints = opened(second)
    with checkpoints:
        parts, _ = checkpoints.restore(second.state_shapes.parts(), print)
    again = second.state_of(parts)
    got = numbers(keying.to_keyed(again.parts()))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got["params"]["embed_head"]["embed"].dtype == jnp.bfloat16
    after, _ = second.train_step(
        again, second.put(jax.tree.map(lambda a: a.reshape(2, 4, 8), BATCH))
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        numbers(keying.to_keyed(after.params)["embed_head"]["embed"]),
        want["params"]["embed_head"]["embed"],
    )


@pytest.mark.slow
def test_fused_steps_are_those_steps(trainer_of):
    """With a loss of float32, since the state after two overlapping steps is compared bitwise."""
    how = ("train.fused_steps=2", "train.compute_dtype=float32", "optimizer.clip_norm=0")
    trainer = trainer_of(*how)
    batch = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), BATCH)
    fused, _ = FusedSteps(trainer).train_steps(trainer.init(), trainer.put(batch))
    state = trainer.init()
    for _ in range(2):
        state, _ = trainer.train_step(state, trainer.put(BATCH))
    jax.tree.map(np.testing.assert_array_equal, numbers(fused.params), numbers(state.params))
