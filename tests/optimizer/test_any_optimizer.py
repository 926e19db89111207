"""Every optimizer on every mesh is that of optax on the model's own parameters, in float64."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_optimizers
import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.core.executor.reference import step_ref
from jaxpipe.optimizer import learning_rate
from jaxpipe.training.trainer import Trainer

STEPS, MICROBATCHES, EXAMPLES, LENGTH = 5, 2, 6, 8
# Three replicas divide none of these sizes, and two ranks have an empty slot for three layers.
# Adafactor factors matrices of at least 128 x 128. Adam divides by eps where a gradient is small,
# and with 1e-8 that would magnify the rounding of the gradient itself.
SMALL_MODEL = ["model.d_model=32", "model.d_ff=64", "model.vocab_size=160"]
LARGER_MODEL = ["model.d_model=128", "model.d_ff=160", "model.vocab_size=160"]
SIZES = [
    "model.n_layers=3", f"train.seq_len={LENGTH}", f"train.grad_accum_steps={MICROBATCHES}",
    "optimizer.lr=0.01", "optimizer.eps=1e-3", "optimizer.weight_decay=0",
    "optimizer.clip_norm=0", "optimizer.decay=constant", "optimizer.warmup_steps=2",
    "train.eval_every=0",
]  # fmt: skip
OURS = {
    "adafactor": lambda rate, config: optax.adafactor(rate),
    "adamw": lambda rate, config: optax.adam(rate, config.beta1, config.beta2, config.eps),
    "nadamw": lambda rate, config: optax.nadam(rate, config.beta1, config.beta2, config.eps),
    "sgd": lambda rate, config: optax.sgd(rate, config.beta1),
    "own_optimizers:shampoo": own_optimizers.shampoo,
    "own_optimizers:eight_bit": own_optimizers.eight_bit,
}
MESHES = {
    "one": {},
    "pp2": {"pp": 2},
    "dp2 ZeRO 0": {"dp": 2, "zero_stage": 0},
    "pp2 dp2 ZeRO 1": {"pp": 2, "dp": 2, "zero_stage": 1},
    "pp2 dp2 ZeRO 3": {"pp": 2, "dp": 2, "zero_stage": 3},
    "tp2": {"tp": 2},
    "pp2 dp3 ZeRO 1": {"pp": 2, "dp": 3, "zero_stage": 1},
    "pp2 dp2 tp2 ZeRO 3": {"pp": 2, "dp": 2, "tp": 2, "zero_stage": 3},
}


def trainer_of(name, mesh):
    sizes = {"pp": 1, "dp": 1, "tp": 1} | mesh
    parallel = [f"parallel.{key}={value}" for key, value in sizes.items()]
    batch = f"train.microbatch_size={EXAMPLES // sizes['dp']}"
    model = LARGER_MODEL if name == "adafactor" else SMALL_MODEL
    config = configs.load(SMALL, [*SIZES, *model, *parallel, batch, f"optimizer.name={name}"])
    devices = sizes["pp"] * sizes["dp"] * sizes["tp"]
    trainer = Trainer.resolve(config, tuple(jax.devices()[:devices]))
    # A cached property that everything else derives from.
    trainer.__dict__["execution"] = replace(trainer.execution, compute_dtype=None)
    return trainer


def batch_at(step):
    shape = MICROBATCHES, EXAMPLES, LENGTH + 1
    ids = np.random.default_rng(step).integers(0, 160, shape, np.int32)
    return {"inputs": ids[..., :-1], "targets": ids[..., 1:]}


def plain(trainer):
    """Return the model's own parameters, in float64."""
    key = jax.random.key(trainer.config.train.seed)
    layers = [trainer.model.init_layer(key, i, kind) for i, kind in enumerate(trainer.layout.kinds)]
    params = {"embed_head": trainer.model.init_embed_head(key), "layers": layers}
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def fresh(trainer):
    params = jax.device_get(plain(trainer))
    whole = params | {"layers": trainer.layout.stack(params["layers"])}
    sharding = trainer.sharding
    return trainer.fresh(jax.device_put(sharding.pad(whole), sharding.named_shardings(whole)))


def keyed(trainer, tree):
    """Return parameters or an optimizer's state by layer, as on disk."""
    return jax.tree.map(np.asarray, StateKeying(trainer.layout, trainer.sharding).to_keyed(tree))


@cache
def reference(name):
    """Return losses, and the leaves of parameters and state, of one device and optax."""
    trainer = trainer_of(name, {})
    config, params, losses = trainer.config, plain(trainer), []
    rate = learning_rate(config.optimizer, config.train.steps)
    optimizer = OURS[name](rate, config.optimizer)
    state = optimizer.init(params)

    @jax.jit
    def train(params, state, batch):
        made = step_ref(trainer.model.functions, params["embed_head"], params["layers"], batch)
        updates, state = optimizer.update(made.gradients, state, params)
        return made.losses.sum(), optax.apply_updates(params, updates), state

    for step in range(STEPS):
        loss, params, state = train(params, state, batch_at(step))
        losses.append(float(loss))
    return losses, by_layer(params), by_layer(state)


def by_layer(tree):
    """Return a tree of the reference in the form of `keyed`."""
    is_params = lambda node: isinstance(node, dict) and "layers" in node  # noqa: E731

    def of(node):
        if not is_params(node):
            return node
        layers = {str(index): layer for index, layer in enumerate(node["layers"])}
        return {"embed_head": node["embed_head"], "layers": layers}

    return jax.tree.map(np.asarray, jax.tree.map(of, tree, is_leaf=is_params))


def assert_close(got, want):
    """Compare to 1e-12 of the largest value of an array; integers exactly."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())


def trained(trainer, state, steps):
    losses = []
    for step in steps:
        state, metrics = trainer.train_step(state, trainer.put(batch_at(step)))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OURS)
def test_every_mesh_trains_as_optax_on_plain_parameters(name, mesh):
    with jax.enable_x64(True):
        losses, params, moments = reference(name)
        trainer = trainer_of(name, MESHES[mesh])
        state, got = trained(trainer, fresh(trainer), range(STEPS))
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        jax.tree.map(assert_close, keyed(trainer, state.params), params)
        if name.startswith("own"):
            jax.tree.map(assert_close, keyed(trainer, state.optimizer), moments)


@pytest.mark.extended
@pytest.mark.slow(unless=["*eight_bit"])
@pytest.mark.parametrize(
    "name", ["adafactor", "own_optimizers:shampoo", "own_optimizers:eight_bit"]
)
def test_a_state_restores_on_any_other_mesh(name, tmp_path):
    """Bit for bit, and training goes on as on the first mesh."""
    before = trainer_of(name, MESHES["pp2 dp2 ZeRO 3"])
    after = trainer_of(name, {"pp": 3, "dp": 2, "zero_stage": 1, "allow_underfilled": "true"})
    state, _ = trained(before, before.init(), range(2))
    how = {"keep": 1, "asynchronous": False}
    with CheckpointStore(
        tmp_path, **how, keying=StateKeying(before.layout, before.sharding)
    ) as checkpoints:
        checkpoints.save(2, state.parts(), {})
    with CheckpointStore(
        tmp_path, **how, keying=StateKeying(after.layout, after.sharding)
    ) as checkpoints:
        parts, _ = checkpoints.restore(after.state_shapes.parts(), say=pytest.fail)
    moved = after.state_of(parts)
    for one, other in zip(state[:2], moved[:2]):
        jax.tree.map(np.testing.assert_array_equal, keyed(before, one), keyed(after, other))
    on, (_, want) = trained(before, state, (2, 3))
    got, (_, found) = trained(after, moved, (2, 3))
    assert found == pytest.approx(want, rel=1e-6)
    assert int(on.step) == int(got.step)
