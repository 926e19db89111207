"""Eight virtual CPU devices, and numbers that fail loudly."""

import os

from jaxpipe.runtime import use_cpu_devices

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    use_cpu_devices(8)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
