"""Pairs of answers: the loss and every gradient that the package trl computes (`record_trl.py`)."""

import json

import jax
import numpy as np
import pytest
import transformers_records as records

from jaxpipe.config import from_builtins
from jaxpipe.model.loss import IGNORE
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.trainer import Trainer

LAYOUTS = {
    "one device": {},
    "zb_h1, tp": {"pp": 2, "tp": 2, "schedule": "zb_h1"},
    "dualpipe, dp": {"pp": 2, "dp": 2, "schedule": "dualpipe"},
}


@pytest.fixture(scope="module")
def dpo():
    with np.load(records.DATA / "dpo.npz") as file:
        return dict(file)


def trainer_of(model, layout, dpo):
    microbatches, rows, length = dpo["tokens"].shape
    train = {"steps": 1, "grad_accum_steps": microbatches, "seq_len": length - 1, "loss": "dpo"}
    config = from_builtins({
        "model": model,
        "parallel": layout,
        "train": train | {"microbatch_size": rows // layout.get("dp", 1)},
        "preference": {"beta": float(dpo["beta"])},
        "data": {"source": "file", "path": "pairs"},
    })  # fmt: skip
    check_settings(config)
    trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
    how = trainer.execution.__class__(**vars(trainer.execution) | {"compute_dtype": None})
    trainer.__dict__["execution"] = how
    return trainer


@pytest.mark.slow(unless=["one*", "zb_h1*"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_every_gradient_of_trl(dpo, layout):
    llama = records.read("llama")
    with jax.enable_x64(True):
        trainer = trainer_of(llama.settings, LAYOUTS[layout], dpo)
        weights = llama.by_our_names("weights", trainer.config.model)
        targets = np.where(dpo["counted"], dpo["tokens"], IGNORE)[..., 1:].astype(np.int32)
        batch = {
            "inputs": dpo["tokens"][..., :-1], "targets": targets,
            "reference": dpo["reference"][..., 1:],
        }  # fmt: skip
        step = jax.jit(trainer.pipeline.losses_and_gradients)
        losses, gradients = step(records.staged(trainer, weights), trainer.put(batch))
        np.testing.assert_allclose(losses[:, 0].sum(), dpo["loss"], rtol=1e-12)
        found = records.by_path(trainer, gradients)
    theirs = records.Record(llama.arrays | {"gradients": dpo["gradients"]})
    for path, want in theirs.by_our_names("gradients", trainer.config.model).items():
        error = np.abs(found[path] - want).max() / np.abs(want).max()
        assert error < 1e-9, (path, error)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which trl calls
def test_the_record_is_what_trl_gives_today(dpo):
    pytest.importorskip("trl")
    import record_trl

    made = record_trl.recorded()
    assert json.dumps(sorted(made)) == json.dumps(sorted(dpo))
    for name, want in dpo.items():
        np.testing.assert_allclose(made[name], want, rtol=1e-10, atol=1e-13, err_msg=name)
