"""Small trained models on disk: what transformers wrote, and what a run saved."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import jax
import numpy as np
import transformers
from checkpoint.test_huggingface_transformers import MODELS as PLAIN
from checkpoint.test_huggingface_transformers import logits_of, made_by_transformers
from outside import test_deepseek as deepseek

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.training.trainer import Trainer

MODELS = (*PLAIN, *deepseek.MODELS)
VOCABULARY = 96  # of all of them
SMALL = Path(__file__).parents[1] / "data" / "small.toml"
ONE_DEVICE = "parallel.pp=1", "parallel.dp=1", "model.n_layers=2", "train.grad_accum_steps=2"
__all__ = ["MODELS", "VOCABULARY", "logits_of", "published", "saved_run"]


@cache
def published(name):
    """Return transformers' model of that name in `MODELS`, and a directory that holds it."""
    transformers.utils.logging.disable_progress_bar()
    directory = Path(mkdtemp()) / name
    if name in PLAIN:
        theirs = made_by_transformers(PLAIN[name])
    else:
        theirs = deepseek.made_by_transformers(name)
    theirs.save_pretrained(directory)
    return theirs, directory


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
