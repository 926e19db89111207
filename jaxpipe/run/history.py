"""A record of every start of a run: configuration, versions and devices."""

import contextlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxpipe.config import Config, to_builtins, to_toml
from jaxpipe.runtime.storage.directory import AppendedFile, WriteGuard
from jaxpipe.runtime.storage.files import write_whole
from jaxpipe.runtime.storage.spool import local_folder


def note_start(config: Config, step: int, guard: WriteGuard) -> None:
    """Record a start of the run from `step`, which is 0 for a new run.

    Overwrites `<run.dir>/config.toml` with the full configuration and appends a line to
    `<run.dir>/starts.jsonl`. `guard` reports a file that cannot be written.
    """
    directory = local_folder(config.run.dir)
    with guard.attempt(str(directory / "config.toml")):
        write_whole(directory / "config.toml", to_toml(config).encode())
    start = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    line = start | versions() | {"config": to_builtins(config)}
    starts = AppendedFile(directory / "starts.jsonl")
    with guard.attempt(str(directory / "starts.jsonl")):
        starts.append(f"{json.dumps(line)}\n".encode())
    with contextlib.suppress(OSError):  # `guard` has just reported it
        starts.close()


def versions() -> dict[str, Any]:
    """Versions, commit and devices of this process; unknown values are None."""
    packages = {name: _version_of(name) for name in ("jaxpipe", "jax", "jaxlib")}
    return {
        "commit": commit(Path(__file__).parents[1]),
        "python": platform.python_version(),
        **packages,
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
    }


def commit(folder: Path) -> str | None:
    """The git commit of the code in a folder, with suffix `-dirty` if files differ from it.

    None without git, or where git does not track the folder: an installed package may lie inside
    the checkout of another project.
    """

    def git(*words: str) -> str:
        ran = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
        return ran.stdout.strip()

    try:
        if not git("ls-files", "--", "*.py"):
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None
    except OSError:
        return None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
