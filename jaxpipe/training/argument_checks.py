"""Checks of the plain arguments of the Python API: they are numbers, and in range."""

import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.config.train import Temperature

_RANGE = typing.get_args(Temperature)[1]  # as for train.loss_temperature


def is_integer(value: Any) -> bool:
    """Whether a value is one integer, of Python, numpy or jax."""
    return _is_one(value) and jnp.issubdtype(jnp.result_type(value), jnp.integer)


def check_temperature(value: Any, *, zero: bool = False) -> None:
    """Raise `ConfigError` unless a value is a temperature; 0 is one if `zero`."""
    if _is_one(value) and (_RANGE.ge <= value <= _RANGE.le or (zero and value == 0)):
        return
    greedy = "0 for the most likely token, or " if zero else ""
    raise ConfigError(f"temperature={value!r}: give {greedy}{_RANGE.ge:g} to {_RANGE.le:g}.")


def check_seed(value: Any) -> None:
    """Raise `ConfigError` unless a value is a seed of random numbers."""
    if not (is_integer(value) and -(2**63) <= value < 2**63):
        raise ConfigError(f"seed={value!r}: give an integer of 64 bits.")


def check_position(position: Any) -> None:
    """Raise `ConfigError` unless the position of a batch in the run is None or a number from 0."""
    if position is not None and not (is_integer(position) and position >= 0):
        raise ConfigError(
            f"position={position!r} of the batch: give the number of its first sample in the run, "
            f"an integer from 0 on."
        )


def _is_one(value: Any) -> bool:
    kinds = int, float, np.number, np.ndarray, jax.Array
    return isinstance(value, kinds) and not isinstance(value, bool) and not np.shape(value)
