"""Settings that follow from the number of devices: replicas, microbatches of a step."""

import pytest
from commands import SMALL

from jaxpipe.config import ConfigError, load
from jaxpipe.planning.checks import filled, validate
from jaxpipe.training.start import on_one_device


def load_small(overrides):
    """Return a configuration of two ranks, one replica and microbatches of one 32-token row."""
    return load(SMALL, ["parallel.pp=2", "parallel.dp=1", *overrides])


def test_replicas_fill_the_devices():
    config = load_small(["parallel.dp=-1", "parallel.pp=2"])
    assert filled(config, None) == config
    assert filled(config, 6).parallel.dp == 3
    validate(filled(config, 6), devices=6)
    fixed = load_small(["parallel.dp=2"])
    assert filled(fixed, 64) == fixed
    for devices in (1, 5):
        with pytest.raises(ConfigError, match=f"takes all {devices} devices, .*pp=2 x .*tp=1 = 2"):
            filled(config, devices)


def test_tokens_of_a_step_are_its_microbatches():
    """A microbatch is one sequence of 32 tokens on each replica."""
    config = load_small(["train.grad_accum_steps=0", "train.batch_tokens=512", "parallel.dp=-1"])
    assert filled(config, None) == config
    by_count = load_small(["train.grad_accum_steps=4", "parallel.dp=4"])
    assert filled(config, 8) == by_count
    assert by_count.tokens_per_step == 512
    validate(filled(config, 8), devices=8)
    assert filled(config, 4).train.grad_accum_steps == 8
    shared = load_small(["train.grad_accum_steps=0", "train.batch_tokens=512", "parallel.dp=4",
                         "parallel.cp=2"])  # fmt: skip
    assert filled(shared, None).train.grad_accum_steps == 8
    assert on_one_device(config).train.grad_accum_steps == 16


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.batch_tokens=128"], "grad_accum_steps=4 with train.batch_tokens=128: give one"),
        (["train.grad_accum_steps=0"], "grad_accum_steps=0 with train.batch_tokens=0: give one"),
        (["train.grad_accum_steps=0", "train.batch_tokens=200", "parallel.dp=2"],
         "batch_tokens=200 is no multiple of the 64 tokens .*on each of 2 replicas.: give 192"),
        (["train.grad_accum_steps=0", "train.batch_tokens=32", "parallel.dp=2"], "give 64, or"),
    ],
)  # fmt: skip
def test_tokens_of_a_step_that_do_not_fit(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate(filled(load_small(overrides), None))
