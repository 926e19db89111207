"""Decoders in steps that overlap, with experts, fp8 or Muon: bit for bit the steps one by one."""

import jax
import numpy as np
import pytest
from commands import SMALL
from test_fused_steps import TWO, at_once, one_by_one
from test_mixtures import SIZES, batches

from jaxpipe import config as configs
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.trainer import Trainer

STEPS, MICROBATCHES, EXAMPLES = 3, 4, 4
SETTINGS = [
    "parallel.schedule=zb_h2", "parallel.vocab_parallel_pp=false", "train.eval_every=0",
    "checkpoint.every=0", f"train.fused_steps={STEPS}", f"train.grad_accum_steps={MICROBATCHES}",
]  # fmt: skip
EP = ["parallel.pp=2", "parallel.dp=2", "parallel.ep=2"]
FP8 = [*TWO, "train.compute_dtype=bfloat16", "model.d_ff=64"]


class RefusesTheSecond(FusedSteps):
    """Fused steps whose second ends the overlap; its loss has more terms than the others'."""

    def _accepts(self, losses, norm, terms):
        return terms < MICROBATCHES * EXAMPLES * 32


@pytest.mark.extended
@pytest.mark.slow(unless=["router bias"])
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*SIZES, *EP], id="router bias"),
        pytest.param([*SIZES, *EP, "parallel.zero_stage=3"], id="ZeRO 3"),
        pytest.param(["parallel.pp=2", "parallel.dp=1", "parallel.tp=2"], id="tp"),
        pytest.param([*FP8, "train.fp8=delayed"], id="fp8 delayed"),
        pytest.param([*FP8, "train.fp8=current"], id="fp8 current"),
        pytest.param([*TWO, "optimizer.name=muon"], id="muon"),
    ],
)
def test_decoders_in_steps_that_overlap(overrides):
    config = configs.load(SMALL, [*SETTINGS, *overrides])
    size = EXAMPLES // config.parallel.dp
    config = configs.load(SMALL, [*SETTINGS, *overrides, f"train.microbatch_size={size}"])
    trainer = Trainer.resolve(config, jax.devices()[: config.parallel.devices])
    every = list(batches_of_steps())
    (state, metrics), (want, numbers) = (
        at_once(RefusesTheSecond(trainer), every), one_by_one(trainer, every)
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert metrics.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6 if "norm" in name else 0)


def batches_of_steps():
    """Yield the batches; all but the second have a row without targets."""
    for step in range(STEPS):
        batch = next(batches(16 * step, MICROBATCHES, EXAMPLES))
        if step != 1:
            batch["targets"] = batch["targets"].copy()  # it shares its memory with the inputs
            batch["targets"][0, 0] = -100
        yield batch
