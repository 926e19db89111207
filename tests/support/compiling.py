"""`plan --check-gpu` in a separate process, and what its tests need to be installed.

The process is separate because jax reads JAX_PLATFORMS, which the check needs to be `cpu`, once.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = str(Path(__file__).parents[1] / "data" / "small.toml")
LLAMA = str(Path(__file__).parents[2] / "configs" / "llama3_8b_pp4.toml")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
HAS_COMPILER = any(map(importlib.util.find_spec, PLUGINS))
HAS_CUDNN = all(map(importlib.util.find_spec, ("nvidia", "nvidia.cudnn")))


def needs_compiler(test):
    """Mark a test of the GPU compiler, which `./launch/test.sh --extended` installs."""
    return pytest.mark.extended(
        pytest.mark.skipif(not HAS_COMPILER, reason="needs jaxpipe[aot]")(test)
    )


def plan(*arguments, config=SMALL, flags=""):
    """Run the command with XLA flags; return its exit code, output and errors."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    environment["XLA_FLAGS"] = flags
    run = subprocess.run(
        [sys.executable, "-m", "jaxpipe.plan", config, *arguments],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    return run.returncode, run.stdout, run.stderr


def report(*arguments, config=SMALL, flags=""):
    given = ("--check-gpu", "h100", "--json", *arguments)
    code, out, errors = plan(*given, config=config, flags=flags)
    assert code == 0, errors
    return json.loads(out)
