"""Steps that overlap in one program leave, to the bit, what the same steps leave one by one."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from routed import batch_at
from toy import LENGTH, TOY, toy_params

from jaxpipe import config as configs
from jaxpipe.pipeline import StageFunctions
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.trainer import Trainer

LAYERS, STEPS, MICROBATCHES, EXAMPLES = 4, 4, 6, 4
SIZES = [
    f"model.n_layers={LAYERS}", f"train.seq_len={LENGTH}", "train.eval_every=0",
    "checkpoint.every=0", f"train.grad_accum_steps={MICROBATCHES}", f"train.fused_steps={STEPS}",
]  # fmt: skip


@dataclass(frozen=True)
class Toy:
    """What a trainer asks its model for."""

    functions: StageFunctions = TOY

    def init_ends(self, key):
        return toy_params(key, 0)[0]

    def init_layer(self, key, index, kind):
        return jax.tree.map(lambda leaf: leaf, _layer(jax.random.fold_in(key, index)))


def _layer(key):
    return toy_params(key, 1)[1][0]


@dataclass(frozen=True)
class ToyTrainer(Trainer):
    """A trainer of the toy."""

    @cached_property
    def model(self):
        return Toy()


def trainer_of(*overrides):
    """On as many devices as the mesh takes; every mesh has the same batch."""
    config = configs.load(SMALL, [*SIZES, *overrides])
    parallel = config.parallel
    examples = f"train.microbatch_size={EXAMPLES // parallel.dp}"
    config = configs.load(SMALL, [*SIZES, *overrides, examples])
    return ToyTrainer(config, tuple(jax.devices()[: parallel.pp * parallel.dp * parallel.tp]))


def steps_of(trainer, batches):
    """State and metrics after each, one by one."""
    state, found = trainer.init(), []
    for batch in batches:
        state, metrics = trainer.train_step(state, trainer.put(batch))
        found.append(metrics)
    return state, {name: np.stack([each[name] for each in found]) for name in found[0]}


def at_once(trainer, batches):
    """The same in one program."""
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    return FusedSteps(trainer).train_steps(trainer.init(), trainer.put(together))


def same(got, want):
    """The state to the bit; losses to the bit, norms but for the order of their sums."""
    (state, metrics), (wanted, numbers) = got, want
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert metrics.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6 if name == "grad_norm" else 0)


BATCHES = [batch_at(number, MICROBATCHES, EXAMPLES) for number in range(STEPS)]


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_auto", "1f1b", "zbv", "interleaved_1f1b"])
def test_steps_that_overlap(schedule, monkeypatch):
    monkeypatch.setattr(FusedSteps, "_in_turn", nothing)
    trainer = trainer_of("parallel.pp=2", "parallel.dp=1", f"parallel.schedule={schedule}", "optimizer.clip_norm=0")
    same(at_once(trainer, BATCHES), steps_of(trainer, BATCHES))


def nothing(self, state, batch):
    """Steps in turn that were never to be asked for."""
    _, metrics = jax.eval_shape(lambda s, b: jax.lax.scan(self.trainer.step, s, jax.tree.map(lambda leaf: leaf.reshape(self.count, -1, *leaf.shape[1:]), b)), state, batch)
    zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    return zeros(state), zeros(metrics)
