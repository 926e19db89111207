"""A run with routed layers and experts: a loss, counts, maxima, and variables they change."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from commands import SMALL
from kinds import CHOICES, layer_params, mixed
from toy import LENGTH, init_toy, toy_batch

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config import LogConfig, RunConfig
from jaxpipe.core.contract import StageFunctions
from jaxpipe.core.mesh import ReplicaFactors, make_mesh
from jaxpipe.run.loop import TrainLoop
from jaxpipe.run.start import start
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.progress import Progress
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

KINDS = ("routed", "experts") * 2
LAYERS, EXAMPLES = len(KINDS), 4  # examples of a microbatch, over all replicas
SIZES = [f"model.n_layers={LAYERS}", f"train.seq_len={LENGTH}", "train.eval_every=0"]


def next_variables(variables, side):
    """Increase the bias of choices that few tokens take."""
    counts = side.sums["counts"]
    few = jnp.sign(counts.mean(axis=1, keepdims=True) - counts)
    return {"bias": variables["bias"] + 0.05 * few}


def functions(ep=1):
    """Return alternating routed layers and experts, with experts sharded over `ep` devices."""
    bias = 0.1 * np.random.default_rng(5).normal(size=(LAYERS, CHOICES))
    return replace(mixed(KINDS, ep), variables={"bias": bias}, next_variables=next_variables)


@dataclass(frozen=True)
class Routed:
    """The model interface that a trainer uses."""

    functions: StageFunctions

    def init_embed_head(self, key):
        return init_toy(key, 0, jnp.result_type(float))[0]

    def init_layer(self, key, index, kind):
        return layer_params(jax.random.fold_in(key, index), kind, jnp.result_type(float))


@dataclass(frozen=True)
class RoutedTrainer(Trainer):
    """A trainer of the toy in float64; `ep` of its replicas form the ep axis."""

    ep: int = 1

    @cached_property
    def model(self):
        return Routed(functions(self.ep))

    @cached_property
    def execution(self):
        return replace(super().execution, compute_dtype=jnp.dtype(jnp.result_type(float)))

    @cached_property
    def mesh(self):
        parallel = self.config.parallel
        return make_mesh(
            parallel.pp, parallel.dp, parallel.tp, self.devices, factors=ReplicaFactors(ep=self.ep)
        )


def trainer_of(*overrides, ep=1):
    """Return a trainer on as many devices as the mesh needs; every mesh has the same batch."""
    config = configs.load(SMALL, [*SIZES, *overrides])
    examples = EXAMPLES // config.parallel.dp
    config = configs.load(SMALL, [*SIZES, *overrides, f"train.microbatch_size={examples}"])
    return RoutedTrainer.resolve(config, jax.devices()[: config.parallel.devices], ep=ep)


def batch_at(position, microbatches, batch_size):
    """Return the toy's batch of the step that starts at `position`."""
    batch = toy_batch(position, microbatches, batch_size)
    return jax.tree.map(np.asarray, batch)


def batches(position, microbatches, batch_size, rows=None):
    """Yield the full batches from a position on."""
    while True:
        yield batch_at(position, microbatches, batch_size)
        position += microbatches * batch_size


def run(trainer, directory, say=lambda _: None, *, console=None, data=batches):
    """Train or resume as the command does; return the exit code."""
    train = SimpleNamespace(batches=data, fingerprint="toy", has="toy".__eq__)
    data = SimpleNamespace(train=train)
    keying = StateKeying(trainer.layout, trainer.sharding)
    saves = directory / "checkpoints"
    config = msgspec.structs.replace(trainer.config, run=RunConfig(dir=str(directory)))
    with CheckpointStore(saves, keep=10, asynchronous=True, keying=keying, say=say) as checkpoints:
        state, seen = start(trainer, data, checkpoints, say)
        last, shown = int(state.step), LogConfig(progress=False, every=1)
        with (
            MetricsLog(directory, last_step=last, loggers=open_loggers(config, last)) as log,
            Progress(config.train.steps, shown, console, silent=console is None) as progress,
        ):
            loop = TrainLoop(trainer, data, checkpoints, progress, log, Group())
            return loop.loop(state, seen)


def restored(trainer, directory):
    """Return `(state keyed by layer as numpy, meta)` of the newest checkpoint."""
    keying = StateKeying(trainer.layout, trainer.sharding)
    where = directory / "checkpoints"
    with CheckpointStore(where, keep=10, asynchronous=False, keying=keying) as checkpoints:
        state, meta = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    return jax.tree.map(np.asarray, keying.to_keyed(state)), meta
