"""Settings that follow from the number of devices: replicas, microbatches of a step."""

import jax
import pytest
from commands import SMALL
from resolving import resolved

from jaxpipe.config import ConfigError, load
from jaxpipe.planning.rules.sizes import resolve_sizes
from jaxpipe.run.start import resolve_on_one_device


def load_small(overrides):
    """Return a configuration of two ranks, one replica and microbatches of one 32-token row."""
    return load(SMALL, ["parallel.pp=2", "parallel.dp=1", *overrides])


def test_replicas_fill_the_devices():
    config = load_small(["parallel.dp=-1", "parallel.pp=2"])
    assert resolve_sizes(config, 6).parallel.dp == 3
    assert resolved(config, count=6).config.parallel.dp == 3
    fixed = load_small(["parallel.dp=2"])
    assert resolve_sizes(fixed, 4) == resolve_sizes(fixed, None) == fixed
    with pytest.raises(ConfigError, match="=2 x parallel.tp=1 = 4 must equal .* devices, 64"):
        resolve_sizes(fixed, 64)
    with pytest.raises(ConfigError, match="parallel.dp=-1: give at least 1"):
        resolve_sizes(config, None)
    for devices in (1, 5):
        with pytest.raises(ConfigError, match=f"takes all {devices} devices, .*pp=2 x .*tp=1 = 2"):
            resolve_sizes(config, devices)


def test_tokens_of_a_step_are_its_microbatches():
    """A microbatch is one sequence of 32 tokens on each replica."""
    config = load_small(["train.grad_accum_steps=0", "train.batch_tokens=512", "parallel.dp=-1"])
    by_count = load_small(["train.grad_accum_steps=4", "parallel.dp=4"])
    assert resolve_sizes(config, 8) == by_count
    assert by_count.tokens_per_step == 512
    assert resolved(config, count=8).config.train == by_count.train
    assert resolve_sizes(config, 4).train.grad_accum_steps == 8
    shared = load_small(["train.grad_accum_steps=0", "train.batch_tokens=512", "parallel.dp=4",
                         "parallel.cp=2"])  # fmt: skip
    assert resolve_sizes(shared, None).train.grad_accum_steps == 8
    assert resolve_on_one_device(config, jax.devices()[0]).config.train.grad_accum_steps == 16


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
        resolved(load_small(overrides))
