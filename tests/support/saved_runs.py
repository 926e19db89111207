"""A small trained model on disk that a run saved."""

from pathlib import Path

import jax
import numpy as np
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.training.trainer import Trainer

ONE_DEVICE = "parallel.pp=1", "parallel.dp=1", "model.n_layers=2", "train.grad_accum_steps=2"


def saved_run(directory, *overrides, steps=2, config=SMALL):
    """Train steps of a configuration on one device; return the trainer, the state, and ids."""
    config = configs.load(config, [*ONE_DEVICE, *overrides, f"run.dir={directory}"])
    trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
    shape = (*config.batch_shape.values(), config.train.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    batch, state = {"inputs": ids[..., :-1], "targets": ids[..., 1:]}, trainer.init()
    for _ in range(steps):
        state, _ = trainer.train_step(state, trainer.put(batch))
    keying = StateKeying(trainer.layout, trainer.sharding)
    with CheckpointStore(
        Path(directory) / "checkpoints", keep=1, asynchronous=False, keying=keying
    ) as store:
        store.save(steps, state.parts(), {"config": configs.to_toml(config), "position": 0})
    return trainer, state, ids
