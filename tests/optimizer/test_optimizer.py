"""Learning rates by hand-picked steps, AdamW against plain NumPy, clipping against optax."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import SMALL
from flax.traverse_util import flatten_dict
from meshes import MODELS
from msgspec import structs

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError, OptimizerConfig, load
from jaxpipe.config.rules import check_rules
from jaxpipe.core.mesh import Sharding, make_mesh
from jaxpipe.model.families import FAMILIES
from jaxpipe.optimizer import (
    KINDS,
    averaged,
    build,
    clip_by_global_norm,
    global_norm,
    groups,
    learning_rate,
)
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.trainer import Trainer

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 23: 1.0}),
        ("linear", {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 23: 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 23: 0.1}),
        ("wsd", {0: 0.25, 3: 1.0, 10: 1.0, 18: 1.0, 23: 0.1}),
        ("wsd_sqrt", {0: 0.25, 10: 1.0, 18: 1.0, 19: 1 - 0.9 * 0.2**0.5, 23: 0.1}),
        ("rex", {0: 0.25, 3: 1.0, 4: 1.0, 23: 0.1}),
        ("inverse_sqrt", {0: 0.25, 3: 1.0, 4: 1.0, 16: 0.5, 23: (4 / 23) ** 0.5}),
    ],
)
def test_learning_rate(decay, rates):
    config = OptimizerConfig(lr=1.0, decay=decay, warmup_steps=4)
    schedule = learning_rate(config, steps=24)
    for step, rate in rates.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-6), step


def test_cosine_and_wsd_in_the_middle():
    cosine = learning_rate(OptimizerConfig(lr=1.0, decay="cosine"), steps=21)
    assert float(cosine(10)) == pytest.approx(0.55)
    wsd = learning_rate(OptimizerConfig(lr=1.0, decay="wsd", min_lr_ratio=0.0), steps=21)
    assert float(wsd(18)) == pytest.approx(0.5)


def test_rex_in_the_middle_and_the_least_of_inverse_sqrt():
    rex = learning_rate(OptimizerConfig(lr=1.0, decay="rex", min_lr_ratio=0.0), steps=21)
    assert float(rex(10)) == pytest.approx(2 / 3)
    root = learning_rate(OptimizerConfig(lr=1.0, decay="inverse_sqrt"), steps=1000)
    assert float(root(3)) == pytest.approx(0.5)
    assert float(root(999)) == pytest.approx(0.1)


def test_warm_up_can_be_the_whole_run():
    schedule = learning_rate(OptimizerConfig(lr=1.0, warmup_steps=3), steps=3)
    assert [round(float(schedule(step)), 4) for step in range(3)] == [0.3333, 0.6667, 1.0]


PARAMS = {
    "embed_head": {"embed": jnp.ones((3, 2)), "norm": jnp.ones(2)},
    "layers": ({"w": jnp.full((2, 2, 2), 0.5), "gain": jnp.ones((2, 2))},),
}


STORED = Sharding(make_mesh(2, devices=jax.devices()[:2])).param_shardings


def _build(name, lr):
    config = OptimizerConfig(name=name, lr=lr, decay="constant", weight_decay=0)
    return build(config, 10, STORED)


def test_groups():
    assert groups(PARAMS, STORED) == {
        "embed_head": {"embed": "embed_head", "norm": "vector"},
        "layers": ({"w": "matrix", "gain": "vector"},),
    }


@pytest.mark.parametrize("model", ["gemma3", "gpt2", "gpt_oss", "latent", "llama4"])
def test_vectors_of_experts_are_no_matrices(model):
    config = MODELS[model]
    leaves = FAMILIES[config.family].build(config).leaves
    for path, spec in jax.tree.leaves_with_path(leaves):
        name = path[-1].key
        is_matrix = name.startswith("w") or name in ("embed", "gate", "head", "positions")
        assert (spec.matrix is not None) == is_matrix, path


@pytest.mark.parametrize("name", KINDS)
def test_every_group_decays_at_its_own_rate(name):
    """With zero gradients an update is decay alone."""
    config = OptimizerConfig(
        name=name, lr=0.1, decay="constant", weight_decay=0.5, decay_of_embed_head=0.2,
        decay_of_vectors=0.4,
    )  # fmt: skip
    optimizer = build(config, 10, STORED)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
    rates = {"matrix": 0.05, "embed_head": 0.01, "vector": 0.02}
    rounding = 1e-7 if name == "schedule_free" else 0  # its updates are differences of parameters
    jax.tree.map(
        lambda update, leaf, group: np.testing.assert_allclose(
            update, -rates[group] * leaf, rtol=1e-6, atol=rounding
        ),
        updates, PARAMS, groups(PARAMS, STORED),
    )  # fmt: skip


class ReadSettings:
    """The section `[optimizer]`, of which it notes what is read."""

    def __init__(self, config):
        self.config, self.names = config, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.config, name)


def refused(**settings):
    """Return whether declared rules refuse `[optimizer]`."""
    try:
        check_rules(structs.replace(load(SMALL), optimizer=OptimizerConfig(**settings)))
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", KINDS)
def test_settings_that_an_optimizer_does_not_read_are_refused(name):
    changed = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "muon_momentum": 0.9, "muon_lr": 0.1}
    read = ReadSettings(OptimizerConfig(name=name, decay="constant", **changed))
    optimizer = build(read, 10, STORED)
    jax.eval_shape(lambda: optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS))
    for key, value in changed.items():
        is_refused = refused(name=name, decay="constant", **{key: value})
        assert is_refused == (key not in read.names), key


@pytest.mark.parametrize("decay", get_args(OptimizerConfig.__annotations__["decay"]))
def test_settings_that_a_decay_does_not_read_are_refused(decay):
    rates = [learning_rate(OptimizerConfig(decay=decay), 24)(step) for step in range(24)]
    for key in ("min_lr_ratio", "wsd_decay_fraction"):
        schedule = learning_rate(OptimizerConfig(decay=decay, **{key: 0.7}), 24)
        is_unread = np.array_equal(rates, [schedule(step) for step in range(24)])
        assert refused(decay=decay, **{key: 0.7}) == is_unread, key


def test_lion_moves_by_signs():
    optimizer = _build("lion", lr=0.1)
    gradients = jax.tree.map(lambda leaf: leaf - 0.7, PARAMS)
    updates, _ = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    jax.tree.map(
        lambda u, g: np.testing.assert_allclose(u, -0.1 * np.sign(g), rtol=1e-6), updates, gradients
    )


@pytest.mark.parametrize("stack", [(2,), (2, 3)], ids=["ranks", "experts"])
def test_muon_makes_each_matrix_of_a_stack_orthogonal(stack):
    """Singular values are near 1 (times Adam's size), for every rank and expert separately."""
    sizes = 50.0 ** jnp.arange(np.prod(stack)).reshape(*stack, 1, 1)
    matrices = jax.random.normal(jax.random.key(0), (*stack, 8, 4)) * sizes
    params = {"embed_head": {"norm": jnp.ones(4)}, "layers": ({"w": jnp.zeros_like(matrices)},)}
    gradients = {"embed_head": {"norm": jnp.ones(4)}, "layers": ({"w": matrices},)}
    optimizer = _build("muon", lr=1.0)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    singular = np.linalg.svd(updates["layers"][0]["w"] / (0.2 * 8**0.5), compute_uv=False)
    assert (singular > 0.6).all()
    assert (singular < 1.3).all()
    np.testing.assert_allclose(updates["embed_head"]["norm"], -1.0, rtol=1e-5)


def test_muon_takes_its_leaves_in_turn():
    """As optax on the whole tree, in two updates; the moments alone need no matrix product."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(1), 5)
        matrices = {f"w{at}": jax.random.normal(key, (2, 8, 4 + at)) for at, key in enumerate(keys)}
        gradients = {"embed_head": {"norm": jnp.ones(4)}, "layers": (matrices,)}
        optimizer = _build("muon", lr=1.0)
        dims = dict.fromkeys(matrices, optax.contrib.MuonDimensionNumbers(1, 2))
        reference = optax.contrib.scale_by_muon(weight_dimension_numbers=dims)
        state, of_reference = optimizer.init(gradients), reference.init(matrices)
        for _ in range(2):
            updates, state = optimizer.update(gradients, state, gradients)
            made, of_reference = reference.update(matrices, of_reference)
            for name, update in updates["layers"][0].items():
                size = 0.2 * max(update.shape[1:]) ** 0.5
                np.testing.assert_allclose(update, -size * made[name], rtol=0, atol=1e-13)
        program = jax.jit(lambda *of: optimizer.update(*of, gradients)).lower(gradients, state)
        moments = jax.jit(lambda *of: optimizer.update(*of, gradients)[1]).lower(gradients, state)
    assert program.as_text().count("optimization_barrier") == len(matrices) - 2
    assert "dot_general" in program.as_text()
    assert "dot_general" not in moments.as_text()


def test_muons_own_learning_rate():
    """Of its group alone, decay included."""
    how = {"name": "muon", "lr": 0.1, "decay": "constant", "weight_decay": 0.5}
    gradients = jax.tree.map(lambda leaf: jnp.cos(7 * leaf) + leaf, PARAMS)
    found = []
    for muon_lr in (0.0, 0.3):
        optimizer = build(OptimizerConfig(**how, muon_lr=muon_lr), 10, STORED)
        updates, _ = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
        found.append(updates)
    jax.tree.map(
        lambda one, other, group: np.testing.assert_allclose(
            other, one * (3 if group == "matrix" else 1), rtol=1e-6
        ),
        *found, groups(PARAMS, STORED),
    )  # fmt: skip


def test_schedule_free_is_that_of_optax():
    """With one rate of decay (ours is by group), warm-up included; and its average."""
    config = OptimizerConfig(
        name="schedule_free", lr=0.01, decay="constant", warmup_steps=3, beta1=0.8, beta2=0.9,
        weight_decay=0.3, decay_of_vectors=1.0,
    )  # fmt: skip
    ours, rate = build(config, 10, STORED), learning_rate(config, 10)
    theirs = optax.contrib.schedule_free(
        optax.chain(
            optax.scale_by_rms(0.9, 1e-8, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(0.3),
            optax.scale_by_learning_rate(rate),
        ),
        lambda count: rate(count - 1),
        0.8,
    )
    got = want = PARAMS
    states = [optimizer.init(PARAMS) for optimizer in (ours, theirs)]
    for step in range(1, 6):
        gradients = [jax.tree.map(lambda leaf, s=step: jnp.cos(leaf * s), p) for p in (got, want)]
        more, states[0] = ours.update(gradients[0], states[0], got)
        other, states[1] = theirs.update(gradients[1], states[1], want)
        got, want = optax.apply_updates(got, more), optax.apply_updates(want, other)
    mean = averaged(states[0], got)
    wanted = optax.contrib.schedule_free_eval_params(states[1], want)
    for one, other in ((got, want), (mean, wanted)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)
    assert not np.allclose(mean["embed_head"]["embed"], got["embed_head"]["embed"], rtol=1e-4)
    assert averaged(states[0].base_optimizer_state, got) is got


@pytest.mark.slow
def test_a_held_out_loss_and_an_export_are_those_of_the_average(tmp_path):
    """With sharded parameters: two ranks of two replicas."""
    how = ["optimizer.name=schedule_free", "optimizer.decay=constant", "optimizer.lr=0.1"]
    config = load(SMALL, ["parallel.pp=2", "parallel.dp=2", *how])
    trainer = Trainer.resolve(config, tuple(jax.devices()[:4]))
    ids = np.random.default_rng(0).integers(0, 256, (4, 2, 32), np.int32)
    batch, state = trainer.put({"inputs": ids, "targets": ids}), trainer.init()
    for _ in range(3):
        state, _ = trainer.train_step(state, batch)
    mean = averaged(state.optimizer, state.params)
    of_mean, trained = (
        float(jax.jit(trainer.pipeline.losses)(params, batch).sum())
        for params in (mean, state.params)
    )
    assert float(trainer.eval_step(state, batch)[0]) == pytest.approx(of_mean, rel=1e-6)
    assert abs(of_mean - trained) > 1e-3
    keying = StateKeying(trainer.layout, trainer.sharding)
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying) as checkpoints:
        checkpoints.save(3, state.parts(), {})
    want = flatten_dict(jax.tree.map(np.asarray, keying.to_keyed(mean)))
    got = StoredCheckpoint(tmp_path / "3").parameters(list(want))
    for leaf, path in zip(got, want, strict=True):
        np.testing.assert_allclose(leaf, want[path], rtol=1e-6, err_msg=path)


def test_adamw_equals_a_plain_reference():
    config = OptimizerConfig(lr=0.01, decay="constant", beta1=0.8, beta2=0.9, weight_decay=0.3)
    optimizer = build(config, 10, STORED)
    state, params = optimizer.init(PARAMS), PARAMS
    reference = {"w": np.full((2, 2, 2), 0.5), "m": 0.0, "v": 0.0}
    for step in range(1, 4):
        gradients = jax.tree.map(lambda leaf, s=step: jnp.cos(leaf * s), params)
        g = np.cos(reference["w"] * step)
        reference["m"] = 0.8 * reference["m"] + 0.2 * g
        reference["v"] = 0.9 * reference["v"] + 0.1 * g * g
        m, v = reference["m"] / (1 - 0.8**step), reference["v"] / (1 - 0.9**step)
        reference["w"] = reference["w"] - 0.01 * (m / (np.sqrt(v) + 1e-8) + 0.3 * reference["w"])
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["layers"][0]["w"], reference["w"], rtol=1e-6)


@pytest.mark.parametrize("limit", [0.1, 1.0, 100.0])
def test_clipping_equals_optax(limit):
    gradients = jax.tree.map(lambda leaf: leaf * 3 - 1, PARAMS)
    norm = global_norm(gradients)
    assert float(norm) == pytest.approx(float(optax.tree.norm(gradients)))
    want, _ = optax.clip_by_global_norm(limit).update(gradients, optax.EmptyState())
    got = clip_by_global_norm(gradients, norm, limit)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)


def test_no_limit_is_no_clipping():
    assert clip_by_global_norm(PARAMS, jnp.float32(1e9), 0.0) is PARAMS


@pytest.mark.extended
@pytest.mark.slow(only=["1"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_muon_treats_the_layers_of_a_loop_one_by_one(zero_stage):
    """Two steps of a trainer whose ranks loop over 3 layers, sharded over replicas."""
    sizes = (
        "model.n_layers=6", "model.d_model=32", "model.d_ff=64", "model.n_heads=2",
        "model.n_kv_heads=1", "parallel.pp=2", "parallel.dp=2", "train.seq_len=16",
        f"parallel.zero_stage={zero_stage}", "optimizer.name=muon", "optimizer.warmup_steps=0",
    )  # fmt: skip

    def trained(unroll):
        config = load(SMALL, [*sizes, f"parallel.unroll_layers={unroll}"])
        trainer = Trainer.resolve(config, tuple(jax.devices()[:4]))
        state, batch = trainer.init(), trainer.put(random_batch(trainer.config))
        for _ in range(2):
            state, _ = trainer.train_step(state, batch)
        lengths = {len(run) for run in trainer.layout.runs}
        return lengths, trainer.layout.unstack(jax.device_get(state.params["layers"]))

    (looped, got), (alone, want) = trained(1), trained(3)
    assert (looped, alone) == ({3}, {1})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
