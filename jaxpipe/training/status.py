"""What a run does, from the files in its directory, while it runs and after it has ended."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage import AnyPath, open_path, size_of
from jaxpipe.runtime.storage_errors import as_os_errors, describe
from jaxpipe.runtime.verdict import Report
from jaxpipe.runtime.watchdog import FILES, STACKS, reports_in

_RECENT = 20.0  # seconds since the last report of a process that still runs


def status(run_dir: str) -> str:
    """Lines on the last step, the checkpoints, every process, profiles, and stacks of hangs.

    It reads no lock and asks no process, so it does not disturb the run. A process whose host's
    clock differs by more than 20 seconds from this one's may be described wrongly.

    Raises:
      ConfigError: the directory is not that of a run.
    """
    directory = open_path(run_dir)
    check_directory(directory)
    lines = [*_step(directory), *_saved(directory), *_running(directory)]
    return "\n".join([*lines, *recordings(directory)])


def check_directory(directory: AnyPath) -> None:
    """Raise `ConfigError` if the directory is not that of a run, or cannot be read."""
    try:
        with as_os_errors():
            is_run = (directory / "config.toml").exists() or (directory / FILES).is_dir()
    except OSError as error:
        reason = f"{directory} cannot be read ({error.strerror}): give a run.dir that you may read."
        raise ConfigError(describe(error, str(directory), reason)) from error
    if not is_run:
        raise ConfigError(f"{directory} is no directory of a run: give the run.dir of one.")


def recordings(directory: AnyPath) -> Iterator[str]:
    """A line for the profiles in a run's directory, and one for every start that hung."""
    profiles = sorted((directory / "profile").glob("process-*/plugins/profile/*"))
    if profiles:
        times = ", ".join(dict.fromkeys(path.name for path in profiles))
        yield f"profiles in {directory / 'profile'}, recorded at {times}"
    for start in sorted((directory / STACKS).glob("*")):
        if any(map(_size, start.glob("*.txt"))):
            yield f"the run hung: stacks of all threads are in {start}"


def _size(path: AnyPath) -> int:
    """The size of a file; 0 if a starting run has just removed it."""
    try:
        return size_of(path)
    except FileNotFoundError:
        return 0


def records(directory: AnyPath, newest: int = 0) -> Iterator[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl, or of its `newest` lines (0: of all)."""
    path = directory / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    for line in content.decode(errors="replace").splitlines()[-newest:]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record


def _step(directory: AnyPath) -> Iterator[str]:
    """The last step that is logged."""
    newest = list(records(directory, newest=2))  # a line that is being written is incomplete
    if not newest:
        yield "no step is logged"
        return
    step, loss, seconds = map(newest[-1].get, ("step", "loss", "step_seconds"))
    words = "not finite" if loss is None else f"{loss:.4f}"
    yield f"step {step}: loss {words}, {seconds or 0.0:.3f} s a step"


def _saved(directory: AnyPath) -> Iterator[str]:
    steps = list_steps(directory / "checkpoints")
    listed = ", ".join(map(str, steps[-5:]))
    yield f"checkpoints: {listed}" if steps else "no checkpoint"


def _running(directory: AnyPath) -> Iterator[str]:
    """A line for every process of the newest start."""
    files = sorted((directory / FILES).glob("process-*.json"))
    reports = list(reports_in([file.read_text(errors="replace") for file in files]))
    newest = max((report.started for report in reports), default="")
    for report in sorted(reports, key=lambda report: report.process):
        if report.started == newest:
            yield f"{report.name} {_doing(report)}"


def _doing(report: Report) -> str:
    written = datetime.fromisoformat(report.written)
    seconds = (datetime.now(UTC) - written).total_seconds()
    if report.over:
        return f"has ended at {report.written}"
    if seconds > _RECENT:
        return f"died or is stopped: last seen {report.doing} at {report.written}"
    return f"is {report.doing}, since {report.age + seconds:.0f} s, in {report.where}"
