"""`bench report`: every measurement for one machine, most valuable first.

Each item is a command in a separate process, which is killed after a limit of seconds. The JSON
file is complete at every moment and contains all results so far, also when a signal or the limit of
`--minutes` ends the report; the same command continues it. At the end it prints a table, with the
error of an item that failed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.lab.bench.items import Item, list_items
from jaxpipe.lab.bench.options import check_out, markdown_table, write_json
from jaxpipe.lab.bench.processes import BenchError, processor_name

_LISTED = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "numpy", "tokamax")
_COLUMNS = (
    "step", "precision", "remat", "tokens/s a GPU", "TFLOP/s a GPU", "MFU", "peak GiB",
)  # fmt: skip
_ERROR = re.compile(r"([\w.]*(Error|Exception)|error): ")


class ItemOutcome(msgspec.Struct):
    """Outcome of an item.

    Attributes:
        command: that was run.
        seconds: it took.
        found: content of its JSON file, or its last line of output.
        error: last error of a failed command, or the limit that ended it; "" if it succeeded.
    """

    command: str
    seconds: float
    found: dict[str, Any] | None = None
    error: str = ""


class ReportResult(msgspec.Struct):
    """One report; `items` has the outcomes by name, `running` the item in progress ("": none)."""

    date: str
    command: str
    machine: str
    versions: dict[str, str]
    items: dict[str, ItemOutcome] = {}
    running: str = ""

    def write(self, path: Path) -> None:
        """Write the JSON file, which is replaced atomically."""
        write_json(self, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.json", help="where to write the results")
    add("--minutes", type=float, default=30, help="after which no item begins (30)")
    add("--cpu", action="store_true", help="tiny sizes on the CPU, to try the report itself")
    add("--items", nargs="+", metavar="NAME", help="only these")


def run(arguments: argparse.Namespace) -> None:
    """Run every item without a successful outcome, and print the table."""
    out = arguments.out
    check_out(out)
    every = list_items(cpu=arguments.cpu)
    unknown = set(arguments.items or ()) - {item.name for item in every}
    if unknown:
        names = ", ".join(item.name for item in every)
        raise ConfigError(f"--items {', '.join(sorted(unknown))}: use some of {names}.")
    result = _resume_or_start(out, arguments)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    last = time.monotonic() + 60 * arguments.minutes
    try:
        for item in every:
            if arguments.items and item.name not in arguments.items:
                continue
            before = result.items.get(item.name)
            if (before is None or before.error) and time.monotonic() < last:
                _measure(item, result, lambda: result.write(out))
    except KeyboardInterrupt as error:
        raise BenchError(f"cut off: {out} has what was found; the same command goes on.") from error
    finally:
        result.write(out)
        print(table(result))
        signal.signal(signal.SIGTERM, handler)


def _resume_or_start(out: Path, arguments: argparse.Namespace) -> ReportResult:
    """Return the report in `out` if it has this machine and these versions, or else a new one."""
    machine, versions = _machine(cpu=arguments.cpu), _versions()
    if out.is_file():
        before = msgspec.json.decode(out.read_bytes(), type=ReportResult)
        if (before.machine, before.versions) == (machine, versions):
            return before
    return ReportResult(date.today().isoformat(), arguments.line, machine, versions)


def _measure(item: Item, result: ReportResult, write: Callable[[], None]) -> None:
    """Run an item, and store its results or its error in the report."""
    result.running = item.name
    write()
    print(f"{item.name}: {item.why} (at most {item.limit} s)", flush=True)
    begin = time.monotonic()
    outcome = result.items[item.name] = ItemOutcome(" ".join(["python -m", *item.words]), 0.0)
    outcome.error = "cut off"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        out = Path(folder) / "found.json"
        process = subprocess.Popen(
            [sys.executable, "-m", *item.words, *(("--out", str(out)) if item.writes else ())],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=item.limit)
            outcome.error = "" if code == 0 else f"exit {code}: {_last_line(output)}"
        except subprocess.TimeoutExpired:
            outcome.error = f"ended after its limit of {item.limit} s"
        finally:
            outcome.seconds = round(time.monotonic() - begin, 1)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if out.is_file():
            outcome.found = msgspec.json.decode(out.read_bytes())
        elif not item.writes:
            outcome.found = {"said": _last_line(output)}
    result.running = ""
    write()
    print(f"{item.name}: {outcome.error or 'done'}, {outcome.seconds:.0f} s", flush=True)


def _last_line(output: TextIO) -> str:
    """Return the last error of a process's output with what follows it, or else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()] or ["it printed nothing"]
    errors = [at for at, line in enumerate(lines) if _ERROR.match(line)]
    return " ".join(lines[(errors or [-1])[-1] :])[:300]


def _machine(*, cpu: bool) -> str:
    """Return the GPUs with driver and memory; with `cpu`, the processor's name."""
    if cpu:
        return processor_name()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"nvidia-smi finds no GPU ({error}): run this on a machine with one, or try it with "
            f"--cpu."
        ) from error
    return "; ".join(listing.strip().splitlines())


def _versions() -> dict[str, str]:
    versions = {dist.name: dist.version for dist in distributions() if dist.name}
    listed = {n: v for n, v in sorted(versions.items()) if n in _LISTED or n.startswith("nvidia-")}
    return {"Python": sys.version.split()[0], **listed}


def table(result: ReportResult) -> str:
    """Return Markdown: the steps, then the outcome of every item."""
    steps = [
        _step_cells(name, outcome.found)
        for name, outcome in result.items.items()
        if outcome.found and "step_seconds" in outcome.found
    ]
    every = [
        [name, f"{outcome.seconds:,.0f}", outcome.error or _summarise(outcome.found or {})]
        for name, outcome in result.items.items()
    ]
    jax = ", ".join(f"{k} {v}" for k, v in result.versions.items() if k in ("Python", "jax"))
    parts = [
        f"{result.date}, {result.machine}; {jax}. `{result.command}`",
        markdown_table(_COLUMNS, steps) if steps else "",
        markdown_table(("item", "seconds", "result"), every) if every else "",
        f"Cut off in `{result.running}`." if result.running else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _step_cells(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    memory, mfu = figures["peak_memory_bytes"], figures["mfu"]
    return (
        name, figures["precision"], figures["remat"],
        f"{figures['tokens_per_second_per_device']:,.0f}",
        f"{figures['flops_per_second_per_device'] / 1e12:,.3g}",
        f"{mfu:.1%}" if mfu else "", f"{memory / 2**30:.1f}" if memory else "",
    )  # fmt: skip


def _summarise(figures: dict[str, Any]) -> str:
    """Return a summary of an item's results for a table cell."""
    if "step_seconds" in figures:
        seconds, compiled = figures["step_seconds"], figures["compile_seconds"]
        return f"{seconds:.3g} s a step, compiled in {compiled:.0f} s"
    if "errors" in figures:
        return "; ".join(
            f"{name} off by " + ", ".join(f"{op} {error:.2g}" for op, error in errors.items())
            for name, errors in figures["errors"].items()
        )
    if "seconds" in figures:
        layer, peak = figures["seconds"]["layer"], figures["peak"]
        return ", ".join(
            f"{op} {1e3 * each:.3g} ms"
            + (f" ({figures['flops'][op] / each / peak:.0%} of the peak)" if peak else "")
            for op, each in layer.items()
        )
    return str(figures.get("said", ""))
