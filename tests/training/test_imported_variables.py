"""A run that starts from an import has the published biases of the routers."""

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from msgspec.structs import replace
from outside.test_deepseek import MODELS

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.hf.naming import list_parameters
from jaxpipe.checkpoint.hf.parameters import model_settings
from jaxpipe.checkpoint.hf.streaming import LazyArray, save_parameters
from jaxpipe.config import from_builtins
from jaxpipe.run.start import start
from jaxpipe.training.trainer import Trainer


def imported(directory, model):
    """Write a checkpoint as an import does; return the values by path."""
    rng, named = np.random.default_rng(0), list_parameters(model)
    values = {one.stored_path: rng.normal(size=one.shape).astype(np.float32) for one in named}
    lazy = {path: LazyArray(x.shape, x.dtype, lambda x=x: x) for path, x in values.items()}
    save_parameters(directory, unflatten_dict(lazy), {})
    return values


@pytest.mark.extended
@pytest.mark.slow(only=["0.0"])
@pytest.mark.parametrize("rate", [0.0, 0.001])
def test_biases_are_those_of_the_import(tmp_path, rate):
    fields = MODELS["v3"][1] | {"architectures": ["DeepseekV3ForCausalLM"]}
    tree = {
        "model": model_settings(fields, tmp_path) | {"router_bias_rate": rate},
        "train": {"steps": 2, "microbatch_size": 2, "grad_accum_steps": 1, "seq_len": 8},
        "checkpoint": {"resume": str(tmp_path / "c"), "parameters_only": True},
    }
    config = from_builtins(tree)
    values = imported(tmp_path / "c", replace(config.model))
    trainer, said = Trainer.resolve(config, jax.devices()[:1]), []
    keying = StateKeying(trainer.layout, trainer.sharding)
    with CheckpointStore(tmp_path / "r", keep=1, asynchronous=False, keying=keying) as checkpoints:
        state, _ = start(trainer, None, checkpoints, said.append)
    biases = values["variables", "router_bias"]
    np.testing.assert_array_equal(state.variables["router_bias"], biases)
    np.testing.assert_array_equal(
        state.params["layers"][1]["attn"]["wkv_a"][0],
        values["params", "layers", "1", "attn", "wkv_a"],
    )
    ids = np.random.default_rng(1).integers(0, 96, (1, 2, 9), np.int32)
    after, _ = trainer.train_step(
        state, trainer.put({"inputs": ids[..., :-1], "targets": ids[..., 1:]})
    )
    moved = np.abs(np.asarray(after.variables["router_bias"]) - biases)
    np.testing.assert_allclose(moved.max(), rate, rtol=1e-3)
