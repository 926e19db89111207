"""A vocabulary that its devices do not divide is padded, and nothing else changes."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import SMALL
from compare import assert_same
from meshes import run
from training_runs import keyed, keying, train_on_random_tokens

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore
from jaxpipe.core.contract.devices import OneDevice
from jaxpipe.core.schedule import Lockstep
from jaxpipe.model.loss import chunked_cross_entropy_sum, cross_entropy_sum
from jaxpipe.planning import Hardware, analytic, estimates
from jaxpipe.training.trainer import Trainer

SHARED = Lockstep(vocab_parallel=True)
MESHES = {
    "tp=2": ("parallel.pp=1", "parallel.tp=2", "parallel.dp=1", "train.microbatch_size=2"),
    "tp=4": ("parallel.pp=1", "parallel.tp=4", "parallel.dp=2", "parallel.zero_stage=2"),
    "shared": ("parallel.pp=2", "parallel.tp=2", "parallel.dp=2",
               "parallel.vocab_parallel_pp=true"),
    "alone": ("parallel.pp=1", "parallel.dp=1", "train.microbatch_size=2"),
}  # fmt: skip


@pytest.mark.extended(unless=["uneven-*1-how1", "uneven_tied-*4-how4"])
@pytest.mark.slow(only=["*-mesh0-*", "*-mesh6-*", "*-mesh7-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("uneven", "1f1b", (1, 1, 2), {}),
        ("uneven", "zb_h1", (2, 1, 4), {"sequence": True, "z_loss": 0.1}),
        (
            "uneven",
            "1f1b",
            (2, 2, 2),
            {"lockstep": SHARED, "zero_stage": 3, "loss_chunks": 2, "examples": 6},
        ),
        ("uneven", "1f1b", (2, 3, 1), {"lockstep": SHARED, "zero_stage": 1, "examples": 6}),
        ("uneven_tied", "1f1b", (1, 2, 4), {"loss_chunks": 4, "z_loss": 0.1, "zero_stage": 1}),
        ("uneven_tied", "1f1b", (4, 1, 2), {"lockstep": SHARED}),  # 5 of 8 devices have entries
        ("uneven_gpt2", "dualpipev", (2, 1, 2), {}),
        ("uneven_gpt2", "1f1b", (2, 1, 2), {"lockstep": SHARED, "slices": 2}),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(model, schedule, mesh, how):
    """In float64, and zero in the padding, as `run` pads the expected values."""
    with jax.enable_x64(True):
        got, want = run(model, schedule, *mesh, dtype=jnp.float64, **how)
        if model == "uneven_gpt2":  # key biases: only rounding
            got, want = (without_key_biases(made) for made in (got, want))
        assert_same(got, want)


def without_key_biases(made):
    losses, gradients = made
    layers = [
        {**layer, "attn": {name: leaf for name, leaf in layer["attn"].items() if name != "bk"}}
        for layer in gradients["layers"]
    ]
    return losses, {**gradients, "layers": tuple(layers)}


class LastOf(OneDevice):
    """The last of several devices; the other devices' contributions to sums are omitted."""

    def index(self):
        return self.size - 1


@pytest.mark.parametrize("own", [7, 4])
def test_padding_counts_as_if_it_were_not_there(own):
    """On a device with 4 entries at most, whatever logits its padding has."""
    random, vocabulary = np.random.default_rng(0), 3 * own + 4
    x, head = random.standard_normal((2, 3, 4, 5)), random.standard_normal((5, own)) * 100
    x, head = jnp.asarray(x[0], jnp.float32), jnp.asarray(head, jnp.float32)
    targets = jnp.asarray(random.integers(3 * own, vocabulary, (3, 4)))
    last = LastOf(4)

    def whole(x, head):
        return cross_entropy_sum(x @ head, targets, last, 0.1, vocabulary).sum()

    def in_chunks(x, head):
        return chunked_cross_entropy_sum(x, head, targets, last, 2, 0.1, vocabulary).sum()

    def without(x, head):
        return cross_entropy_sum(x @ head[:, :4], targets - 3 * own, z_loss=0.1).sum()

    want = jax.value_and_grad(without, (0, 1))(x, head)
    for function in (whole, in_chunks):
        got = jax.value_and_grad(function, (0, 1))(x, head)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6), got, want)
        assert not np.asarray(got[1][1])[:, 4:].any()


def trained(trainer, state, steps):
    return train_on_random_tokens(trainer, state, steps, vocab_size=257, shape=(4, 2, 33))


def trainer_of(mesh, *overrides):
    config = configs.load(SMALL, ["model.vocab_size=257", *MESHES[mesh], *overrides])
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


def saved(trainer, state, directory):
    with CheckpointStore(
        directory, keep=1, asynchronous=True, keying=keying(trainer)
    ) as checkpoints:
        checkpoints.save(1, state.parts(), {})


def restored(trainer, directory):
    with CheckpointStore(
        directory, keep=1, asynchronous=True, keying=keying(trainer)
    ) as checkpoints:
        parts, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    return trainer.state_of(parts)


@pytest.mark.slow(only=["tp=4", "shared"])
@pytest.mark.parametrize("mesh", ["tp=4", "shared"])
def test_training_is_that_of_one_device(mesh, tmp_path):
    """Initial values are bitwise equal, losses too, and its checkpoint restores on any mesh."""
    one, other = trainer_of("alone"), trainer_of(mesh)
    start = other.init()
    chex.assert_trees_all_equal(keyed(other, start), keyed(one, one.init()))
    want, losses = trained(one, one.init(), range(2))
    got, found = trained(other, start, range(2))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    saved(other, got, tmp_path / "there")
    handler, path = ocp.PyTreeCheckpointHandler(), tmp_path / "there" / "1" / "state"
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(handler.metadata(path).tree)]
    assert {(257, 32), (32, 257)} <= {*shapes}
    assert not [shape for shape in shapes if {258, 260} & {*shape}]  # no padding is on disk
    here = restored(one, tmp_path / "there")
    chex.assert_trees_all_equal(keyed(one, here), keyed(other, got))
    saved(one, here, tmp_path / "back")
    again = restored(other, tmp_path / "back")
    chex.assert_trees_all_equal(again.params, got.params)
    _, onward = trained(other, again, [2])
    np.testing.assert_allclose(onward, trained(one, want, [2])[1], rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("mesh", ["tp=4", "shared"])
def test_padded_bytes_are_planned(mesh):
    trainer = trainer_of(mesh)
    found, _ = estimates(trainer.config, analytic(trainer.config, Hardware()))
    planned = next(each for each in found if each.label == "1f1b").bytes
    shapes, places = trainer.state_shapes.params, trainer.state_shardings.params
    shard = jax.tree.map(lambda leaf, of: 4 * math.prod(of.shard_shape(leaf.shape)), shapes, places)
    assert planned.parameters == sum(jax.tree.leaves(shard))
