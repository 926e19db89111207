"""What a run does, from the files in its directory, while it runs and after it has ended."""

import itertools
import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError
from jaxpipe.run.watch.log_lines import lines_from_end
from jaxpipe.runtime.hang_cause import Report
from jaxpipe.runtime.storage.errors import as_os_errors, describe
from jaxpipe.runtime.storage.files import AnyPath, open_binary, open_path, size_of
from jaxpipe.runtime.watchdog import FILES, STACKS, reports_in

_LINES = 100  # of metrics.jsonl that are read in search of one that is not damaged
_RECENT = 20.0  # seconds since the last report of a process that still runs


def status(run_dir: str) -> str:
    """Lines on the run's name, the last step, checkpoints, processes, profiles and hangs.

    It reads no lock and asks no process, so it does not disturb the run. A process whose host's
    clock differs by more than 20 seconds from this one's may be described wrongly.

    Raises:
      ConfigError: the directory is not that of a run.
    """
    directory = open_path(run_dir)
    check_directory(directory)
    lines = [f"run {name_of(directory)}, in {directory}", *_step(directory), *_saved(directory)]
    return "\n".join([*lines, *_running(directory), *recordings(directory)])


def config_of(directory: AnyPath) -> str:
    """The config.toml of a run's newest start; "" where it cannot be read."""
    try:
        return (directory / "config.toml").read_text()
    except (OSError, ValueError):
        return ""


def _settings(directory: AnyPath) -> dict[str, Any]:
    """The settings of `config_of`; empty where they are damaged."""
    try:
        return tomllib.loads(config_of(directory))
    except tomllib.TOMLDecodeError:
        return {}


def name_of(directory: AnyPath) -> str:
    """The name of a run: the last folder of its run.dir, else of the directory."""
    try:
        configured = Path(_settings(directory)["run"]["dir"]).name
    except (KeyError, TypeError):
        configured = ""
    return configured or Path(str(directory)).resolve().name


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
    """The last step that is logged, of how many, its tokens, and the time that the rest takes."""
    path, newest = directory / "metrics.jsonl", None
    if path.exists():
        with open_binary(path) as file:
            lines = (line for _, line in lines_from_end(file))
            # A line that is being written is incomplete.
            newest = next(filter(None, map(_record, itertools.islice(lines, _LINES))), None)
    if not newest:
        yield "no step is logged"
        return
    step, loss, seconds = newest["step"], newest.get("loss"), newest.get("step_seconds") or 0.0
    words = "not finite" if loss is None else f"{loss:.4f}"
    line = f"step {step}: loss {words}, {seconds:.3f} s a step"
    if tokens := newest.get("tokens_seen"):
        line += f", {tokens:,} tokens so far"
    if total := _steps_of(directory):
        left = timedelta(seconds=round(seconds * max(total - step, 0)))
        line += f", {total} steps in all: about {left} to go" if step < total else ", the last"
    yield line


def _steps_of(directory: AnyPath) -> int | None:
    """`train.steps` of the newest start; None where its settings lack it."""
    try:
        return int(_settings(directory)["train"]["steps"])
    except (ValueError, KeyError, TypeError):
        return None


def _saved(directory: AnyPath) -> Iterator[str]:
    checkpoints = directory / "checkpoints"
    if steps := list_steps(checkpoints):
        listed = ", ".join(map(str, steps[-5:]))
        yield f"checkpoints: {listed}; the newest is {checkpoints / str(steps[-1])}"
    else:
        yield "no checkpoint"


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
