"""The records of `record_transformers.py`, and jaxpipe's run of the same model on any layout."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from updates import SETTINGS

from jaxpipe.checkpoint.hf.naming import hf_format, locate_parameters
from jaxpipe.checkpoint.hf.parameters import model_settings
from jaxpipe.config import from_builtins
from jaxpipe.model.loss import IGNORE
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.trainer import Trainer

DATA = Path(__file__).parents[1] / "data" / "outside"


@dataclass(frozen=True)
class Record:
    """Results of transformers, torch and NumPy for one model: the arrays of its file."""

    arrays: dict[str, np.ndarray]

    @property
    def config_json(self):
        return json.loads(str(self.arrays["config"]))

    @property
    def settings(self):
        """Return the `[model]` settings."""
        return model_settings(self.config_json, DATA)

    def by_their_names(self, kind):
        """Return arrays of `weights`, `gradients`, `adamw` or `muon` by Hugging Face's names."""
        shapes, found, begin = json.loads(str(self.arrays["shapes"])), {}, 0
        for name, shape in shapes.items():
            end = begin + int(np.prod(shape))
            found[name] = self.arrays[kind][begin:end].reshape(shape)
            begin = end
        assert begin == len(self.arrays[kind])
        return found

    def by_our_names(self, kind, model):
        """Return these arrays by path, as `("layers", "3", "attn", "wq")`, in jaxpipe's layouts."""
        theirs = self.by_their_names(kind)
        read = lambda name, expert=...: theirs[name][expert]  # noqa: E731
        return {
            own.path: np.asarray(own.from_hf(read))
            for own in locate_parameters(model, hf_format(model), SimpleNamespace(names=theirs))
            if not own.is_variable
        }

    def batch(self, step):
        """Return inputs and targets `[M, B, L]` of a step."""
        tokens, ignored = self.arrays["tokens"][step], self.arrays["ignored"][step]
        targets = np.where(ignored, IGNORE, tokens[..., 1:]).astype(np.int32)
        return {"inputs": tokens[..., :-1], "targets": targets}


@cache
def read(name):
    with np.load(DATA / f"{name}.npz") as file:
        return Record(dict(file))


def trainer_of(record, layout, optimizer="adamw", **execution):
    """Return the trainer of a record's model on a layout, computing in the parameters' dtype."""
    microbatches, batch, length = record.batch(0)["inputs"].shape
    parallel = {"dp": 1, **layout}
    each = batch * parallel.get("cp", 1) // parallel["dp"]
    train = {"steps": 10, "microbatch_size": each, "grad_accum_steps": microbatches}
    settings = SETTINGS | {"name": optimizer, "decay": "constant", "warmup_steps": 0}
    tree = {
        "model": record.settings,
        "parallel": parallel,
        "train": train | {"seq_len": length},
        "optimizer": settings,
    }
    config = from_builtins(tree)
    check_settings(config)
    trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
    how = replace(trainer.execution, compute_dtype=None, **execution)
    trainer.__dict__["execution"] = how  # a cached property that everything else derives from
    return trainer


def staged(trainer, by_path):
    """Return parameters by path as the trainer stores them, in float64."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), unflatten_dict(by_path))
    layers = [tree["layers"][str(i)] for i in range(len(tree["layers"]))]
    whole = {"embed_head": tree["embed_head"], "layers": trainer.layout.stack(layers)}
    return jax.device_put(trainer.sharding.pad(whole), trainer.sharding.named_shardings(whole))


def by_path(trainer, params):
    """Invert `staged`."""
    hows = trainer.sharding.param_shardings(params)
    params = jax.tree.map(
        lambda how, leaf: np.asarray(leaf)[tuple(map(slice, how.unpadded_shape(leaf.shape)))],
        hows, params,
    )  # fmt: skip
    layers = trainer.layout.unstack(params["layers"])
    tree = {
        "embed_head": params["embed_head"],
        "layers": {str(i): one for i, one in enumerate(layers)},
    }
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {tuple(part.key for part in path): np.asarray(leaf) for path, leaf in leaves}


@jax.enable_x64(True)
def loss_and_gradients(record, layout, **execution):
    """Return the loss of the first step, and its gradients by path."""
    trainer = trainer_of(record, layout, **execution)
    params = staged(trainer, record.by_our_names("weights", trainer.config.model))
    batch = trainer.put(record.batch(0))
    variables = trainer.model.functions.variables
    losses, gradients = jax.jit(trainer.pipeline.losses_and_gradients)(params, batch, variables)
    return float(losses.sum()), by_path(trainer, gradients)


@jax.enable_x64(True)
def trained(record, layout, optimizer, steps):
    """Return the losses of some steps, the first step's gradients, and the last parameters."""
    trainer = trainer_of(record, layout, optimizer)

    def loss_and_gradients(state, batch):
        state, metrics, outputs = trainer.step_with_outputs(state, batch)
        return state, (metrics["loss"], outputs.gradients)

    step, found = trainer.compiled(loss_and_gradients), []
    state = trainer.fresh(staged(trainer, record.by_our_names("weights", trainer.config.model)))
    for number in range(steps):
        state, made = step(state, trainer.put(record.batch(number)))
        found.append(made)
    losses = [float(loss) for loss, _ in found]
    return losses, by_path(trainer, found[0][1]), by_path(trainer, state.params)
