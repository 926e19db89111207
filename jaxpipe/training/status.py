"""What a run does, from the files in its directory, while it runs and after it has ended."""

import itertools
import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage import AnyPath, open_binary, open_path, size_of
from jaxpipe.runtime.storage_errors import as_os_errors, describe
from jaxpipe.runtime.verdict import Report
from jaxpipe.runtime.watchdog import FILES, STACKS, reports_in
from jaxpipe.training.log_lines import lines_from_end

_LINES = 100  # of metrics.jsonl that are read in search of one that is not damaged
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


def records(directory: AnyPath) -> Iterator[dict[str, Any]]:
    """The complete lines of a run's metrics.jsonl."""
    path = directory / "metrics.jsonl"
    if path.exists():
        with path.open("rb") as file:
            yield from filter(None, map(_record, file))


def _record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _step(directory: AnyPath) -> Iterator[str]:
    """The last step that is logged, of how many, and the time that the rest takes."""
    path, newest = directory / "metrics.jsonl", None
    if path.exists():
        with open_binary(path) as file:
            lines = (line for _, line in lines_from_end(file))
            # A line that is being written is incomplete.
            newest = next(filter(None, map(_record, itertools.islice(lines, _LINES))), None)
    if not newest:
        yield "no step is logged"
        return
    step, loss, seconds = map(newest.get, ("step", "loss", "step_seconds"))
    words = "not finite" if loss is None else f"{loss:.4f}"
    line = f"step {step}: loss {words}, {seconds or 0.0:.3f} s a step"
    if total := _steps_of(directory):
        left = timedelta(seconds=round((seconds or 0.0) * max(total - step, 0)))
        line += f", {total} steps in all: about {left} to go" if step < total else ", the last"
    yield line


def _steps_of(directory: AnyPath) -> int | None:
    """`train.steps` of the newest start; None where its config.toml cannot be read."""
    try:
        return int(tomllib.loads((directory / "config.toml").read_text())["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _saved(directory: AnyPath) -> Iterator[str]:
    steps = list_steps(directory / "checkpoints")
    listed = ", ".join(map(str, steps[-5:]))
    yield f"checkpoints: {listed}" if steps else "no checkpoint"


def _running(directory: AnyPath) -> Iterator[str]:
    """A line for every process of the newest start.

    Every start has a process 0, which overwrites the report of the one before, so its report is of
    the newest start, whatever the clocks of the hosts were.
    """
    files = sorted((directory / FILES).glob("process-*.json"))
    reports = list(reports_in([file.read_text(errors="replace") for file in files]))
    reports.sort(key=lambda report: report.process)
    for report in reports:
        if report.started == reports[0].started:
            yield f"{report.name} {_doing(report)}"


def _doing(report: Report) -> str:
    written = datetime.fromisoformat(report.written)
    seconds = (datetime.now(UTC) - written).total_seconds()
    if report.over:
        return f"has ended at {report.written}"
    if seconds < -_RECENT:
        return (
            f"was last seen {report.doing} at {report.written}, which this machine's clock has not "
            f"reached: set the clocks, or see whether it still runs"
        )
    if seconds > _RECENT:
        return f"died or is stopped: last seen {report.doing} at {report.written}"
    return f"is {report.doing}, since {report.age + max(seconds, 0):.0f} s, in {report.where}"
