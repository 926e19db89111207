"""A run's own optimizer is imported, or refused with one sentence as settings are checked."""

import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.planning.rules.run import RUN_CHECKS


def check(name):
    config = configs.load(SMALL, [f"optimizer.name={name}"])
    for rule in RUN_CHECKS:
        rule(config)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adam", "unknown optimizer.name='adam': .*did you mean 'adamw'"),
        ("no_such_optimizers:shampoo", "module 'no_such_optimizers' cannot be imported"),
        ("own_optimizers:no_such", "no function 'no_such'"),
        ("own_optimizers:NUMBER", "no function 'NUMBER'"),
        ("own_optimizers:", "no function ''"),
        ("own_optimizers:needs_more", "raises TypeError .*learning_rate, config"),
        ("own_optimizers:no_optimizer", "returns a .*: return an optax.GradientTransformation"),
        ("own_optimizers:needs_a_loss", "fails on the parameters .*TypeError"),
        ("own_optimizers:clipped", r"computes .* from .*optimizer.clip_norm"),
        ("own_optimizers:counted", r"computes .* from .*optimizer.clip_norm"),
        ("own_optimizers:noisy", r"draws random numbers \(\w+\)"),
    ],
)
def test_refusals(name, says):
    with pytest.raises(ConfigError, match=says):
        check(name)


@pytest.mark.parametrize("name", ["shampoo", "eight_bit"])
def test_optimizers_that_update_parameters_one_by_one(name):
    check(f"own_optimizers:{name}")
