"""Values that must be equal on all processes before they run a program together."""

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path

import jax
from msgspec import structs, to_builtins

import jaxpipe
from jaxpipe.config import Config, RunConfig
from jaxpipe.config.functions import is_custom
from jaxpipe.data.sources import RunData
from jaxpipe.planning import RunPlan

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "orbax-checkpoint")
# Settings of jax, which environment variables change, too, on which programs or numbers depend.
_JAX_SETTINGS = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_disable_jit",
    "jax_enable_custom_prng", "jax_enable_x64", "jax_numpy_dtype_promotion",
    "jax_random_seed_offset", "jax_softmax_custom_jvp", "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)  # fmt: skip


def programs_of(config: Config) -> dict[str, str]:
    """Inputs of a process's programs: versions, source, device kind, flags and settings.

    `--xla_dump*` flags are left out: processes may dump to different places.
    """
    kinds = {device.device_kind for device in jax.local_devices()}
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings = to_builtins(config)
    return {
        **{f"the version of {name}": version(name) for name in _PACKAGES},
        **{name.upper(): str(jax.config.values.get(name)) for name in _JAX_SETTINGS},
        "the source of jaxpipe": _digest(_sources()),
        "the kind of device": ", ".join(sorted(kinds)),
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith("--xla_dump")),
    } | {
        f"{section}.{key}": repr(value)
        for section, keys in settings.items()
        for key, value in keys.items()
    }


def inputs_of_programs(plan: RunPlan) -> str:
    """What a run's programs depend on, apart from what `ProgramStore` adds.

    It is "" where that is not known: with functions of the user, which may call anything; in a
    process that was not started as a command of jaxpipe and may have replaced some of its parts;
    and with packages installed from a directory, whose source changes without their version.
    """
    config, command = plan.config, getattr(sys.modules["__main__"], "__spec__", None)
    own = command is not None and command.name.startswith("jaxpipe.")
    urls = (distribution(name).read_text("direct_url.json") or "" for name in _PACKAGES)
    local = any("dir_info" in url for url in urls)
    if not own or local or is_custom(config.optimizer.name) or is_custom(config.train.loss):
        return ""
    installed = sorted(path.name for part in sys.path for path in Path(part).glob("*.dist-info"))
    installed += map(_describe_files, _PACKAGES)
    anywhere = structs.replace(config, run=RunConfig())
    return f"{programs_of(anywhere)} {_digest_of(plan, anywhere)} {installed}"


def results_of(plan: RunPlan, data: RunData) -> dict[str, str]:
    """A process's data fingerprints, layers per stage, and a digest of its plan with its tables."""
    return {
        "the training data": data.train.fingerprint,
        "the held-out data": data.heldout.fingerprint,
        "the layers of each stage": str(plan.layers),
        "the schedule and its plan": f"{plan.schedule.name} ({_digest_of(plan, plan.config)})",
    }


def _describe_files(package: str) -> str:
    """Where a package is imported from, and what changes there if a file is edited."""
    spec = find_spec(package.replace("-", "."))
    origin = spec and spec.origin
    assert origin  # of a package that is installed
    folder = Path(origin).parent
    stats = [path.stat() for path in folder.rglob("*.py")]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return f"{folder} {len(stats)} {sum(stat.st_size for stat in stats)} {newest}"


def _digest_of(plan: RunPlan, config: Config) -> str:
    tables = plan.tables
    described = (
        config, plan.layers, plan.seconds, tables.slots, tables.lanes, tables.permute_pairs,
        tables.pairs, tables.lockstep,
    )  # fmt: skip
    columns = [column.tobytes() for column in jax.tree.leaves(tables.columns)]
    return _digest([repr(described).encode(), *columns])


def _sources() -> Iterable[bytes]:
    root = Path(jaxpipe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix().encode()
        yield path.read_bytes()


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
