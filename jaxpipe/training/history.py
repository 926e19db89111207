"""What a run was started with, every time: its configuration, and the versions and devices."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxpipe.config import Config, to_toml


def note_start(config: Config, step: int) -> None:
    """Write down that the run goes on from this step, which is 0 at first.

    `<run.dir>/config.toml` is the whole configuration, the newest if there were others; every one
    is kept in `<run.dir>/starts.jsonl`, a line a start. Raises `OSError` where these cannot be
    written.
    """
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / "config.toml.new"
    fresh.write_text(to_toml(config))
    fresh.replace(directory / "config.toml")
    start = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    with (directory / "starts.jsonl").open("a") as file:
        line = start | versions() | {"config": msgspec.to_builtins(config)}
        file.write(json.dumps(line) + "\n")


def versions() -> dict[str, Any]:
    """What this process runs with; None where it is not known."""
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
    """The git commit of the code in a folder, `-dirty` behind it where files differ from it.

    None without git, or where git does not keep this folder: packages may lie in the checkout of
    something else.
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
