"""Arguments, early checks and output that the bench commands share."""

import argparse
import os
import platform
import shutil
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import resolve_sizes
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import use_cpu_devices, use_gpu_memory
from jaxpipe.runtime.storage.files import write_whole


def add_config(parser: argparse.ArgumentParser, example: str, *, needed: bool = True) -> None:
    """Add the arguments for a configuration and its overrides; `example` is shown in the help."""
    optional: dict[str, Any] = {} if needed else {"nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("config", help=f"a TOML file, such as {example}", **optional)
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add `--out`, the JSON file of the results."""
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the results")


def add_torch(parser: argparse.ArgumentParser) -> None:
    """Add `--torch`, the Python of PyTorch's processes."""
    parser.add_argument(
        "--torch", metavar="PYTHON", help="a Python with torch, to measure PyTorch as well"
    )


def check_torch(python: str | None) -> None:
    """Raise `ConfigError` if the Python of PyTorch's processes cannot be started."""
    if python and not shutil.which(python):
        raise ConfigError(f"--torch {python} cannot be started: give a Python with torch.")


def check_out(path: Path | None) -> None:
    """Raise `ConfigError` if the results cannot be written, before anything is measured."""
    if path and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"--out {path} cannot be written: its folder is missing or read-only.")


def check_positive(**counts: int) -> None:
    """Raise `ConfigError` for the first option that is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {count} must be at least 1.")


def load_for_devices(arguments: argparse.Namespace) -> Config:
    """Return the validated configuration and select jax's devices; call before jax's first use."""
    config = configs.load(arguments.config, arguments.overrides)
    check_settings(config)
    config = resolve_sizes(config, None)
    check_out(arguments.out)
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    use_gpu_memory()
    check_devices()
    return config


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return date, command and versions, with which every result begins."""
    return {
        "date": date.today().isoformat(),
        "command": arguments.line,
        "versions": {"Python": platform.python_version(), "jax": version("jax")},
    }


def write_json(result: Any, path: Path | None) -> None:
    """Write the results as JSON if `path` is given."""
    if path:
        content = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
        write_whole(path, content)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a column without a value in any row is left out."""
    known = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = ([line[i] for i in known] for line in (header, ["---"] * len(header), *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
