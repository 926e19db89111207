"""Eight virtual CPU devices, numbers that fail loudly, and the short selection (`--short`)."""

import os

from jaxpipe.runtime.environment import use_cpu_devices

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    # Tiny programs are compiled and run once: machine code that is not optimised, of the same HLO,
    # takes 40 % less of the processor to make.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    use_cpu_devices(8)

import jax
from selection import pytest_addoption, pytest_configure  # noqa: F401

jax.config.update("jax_numpy_rank_promotion", "raise")
