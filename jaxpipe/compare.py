"""`python -m jaxpipe.compare RUN RUN`: where two runs part, and what differs in their settings.

A RUN is the `run.dir` of one. Reads both metrics.jsonl and config.toml, prints at which step a
metric first differs and first differs by more than a tolerance, and draws it. Exit codes: 0 it
nowhere differs by more; 1 it does; 2 bad input.
"""

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxpipe.config import ConfigError, first_line
from jaxpipe.config.paths import local_path

Values = Mapping[int, float]  # of one metric by step; NaN where it was not finite


@dataclass(frozen=True)
class Parting:
    """How two runs differ in one metric, over the steps that both have.

    Differences are relative to the larger of the two values. `first` is the first step with any,
    `beyond` the first with one above the tolerance; None: there is none.
    """

    steps: int
    first: int | None
    beyond: int | None
    largest: float
    largest_at: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.compare", description=__doc__)
    parser.add_argument("runs", nargs=2, type=local_path, metavar="RUN", help="a run's run.dir")
    add = parser.add_argument
    add("--metric", default="loss", help="a number of metrics.jsonl (loss)")
    add("--tolerance", type=float, default=1e-6, help="relative (1e-6)")
    add("--picture", type=local_path, default=Path("compare.svg"), help=".svg, .pdf or .png")
    arguments = parser.parse_args(argv)
    try:
        values = [read(run, arguments.metric) for run in arguments.runs]
        found = parting(*values, arguments.tolerance)
        differing = differing_settings(*map(settings, arguments.runs))
        draw(arguments.runs, values, arguments.metric, arguments.picture)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(arguments, values, found, differing)
    return 0 if found.beyond is None else 1


def read(run: Path, metric: str) -> Values:
    """A metric of a run by step; `ConfigError` where the run has none."""
    path = run / "metrics.jsonl"
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): give the run.dir of a run that has logged."
        ) from error
    lines = list(map(_fields_of, text.splitlines()))
    values = {line["step"]: line[metric] for line in lines if metric in line and "step" in line}
    if not values or any(isinstance(value, list) for value in values.values()):
        names = sorted(
            {name for line in lines for name in line if not isinstance(line[name], list)}
        )
        raise ConfigError(
            f"{path} has no number {metric!r} of a step: give another as --metric; there are "
            f"{', '.join(names) or 'none'}."
        )
    return {step: math.nan if value is None else value for step, value in values.items()}


def _fields_of(line: str) -> dict[str, Any]:
    """A line of the log; nothing of one that a run is still writing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def settings(run: Path) -> dict[str, Any] | None:
    """Every setting of a run by `section.key`, but for run.dir; None where none were written."""
    path = run / "config.toml"
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path} ({first_line(error)}): repair or remove it."
        ) from error
    every = {f"{name}.{key}": value for name, part in tree.items() for key, value in part.items()}
    return {name: value for name, value in every.items() if name != "run.dir"}


def parting(one: Values, other: Values, tolerance: float) -> Parting:
    """Where two runs part; `ConfigError` where they have no step in common.

    >>> parting({1: 2.0, 2: 1.0, 3: 1.0}, {1: 2.0, 2: 1.001, 3: 1.25, 4: 1.0}, 0.1)
    Parting(steps=3, first=2, beyond=3, largest=0.2, largest_at=3)
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ConfigError("the runs have no step in common: give two of which one goes as far.")
    apart = {step: _difference(one[step], other[step]) for step in common}
    worst = max(common, key=apart.__getitem__)
    return Parting(
        steps=len(common),
        first=next((step for step in common if apart[step] > 0), None),
        beyond=next((step for step in common if apart[step] > tolerance), None),
        largest=apart[worst],
        largest_at=worst,
    )


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(difference) else difference


def differing_settings(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]] | None:
    """Both values of every setting that differs; None of what a run does not have, or of no file.

    >>> differing_settings({"parallel.pp": 2, "train.seed": 0}, {"parallel.pp": 4, "train.seed": 0})
    {'parallel.pp': (2, 4)}
    """
    if one is None or other is None:
        return None
    both = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def draw(runs: Sequence[Path], values: Sequence[Values], metric: str, path: Path) -> None:
    """The metric of both runs by step, and below it by how much they differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for run, of, width in zip(runs, values, (2.4, 1.0)):  # both are seen where they agree
        curves.plot(list(of), list(of.values()), label=str(run), linewidth=width)
    one, other = values
    common = sorted(one.keys() & other.keys())
    apart.plot(common, [_difference(one[step], other[step]) for step in common], linewidth=1)
    apart.set_yscale("symlog", linthresh=1e-9)
    curves.set(ylabel=metric)
    apart.set(xlabel="step", ylabel="relative difference")
    for axes in (curves, apart):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    curves.legend(frameon=False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path} cannot be written ({first_line(error)}).") from error


def _print(
    arguments: argparse.Namespace,
    values: Sequence[Values],
    found: Parting,
    differing: dict[str, tuple[Any, Any]] | None,
) -> None:
    console, runs = Console(highlight=False), list(map(str, arguments.runs))
    table = Table(title=f"{arguments.metric}, {found.steps} steps in common")
    for heading in ("", "step"):
        table.add_column(heading, no_wrap=True)
    for heading in (*runs, "difference"):
        table.add_column(heading, overflow="fold")
    for words, step in {
        "first that differs": found.first,
        f"first by more than {arguments.tolerance:g}": found.beyond,
        "that differs most": found.largest_at if found.first else None,
        "last of both": max(values[0].keys() & values[1].keys()),
    }.items():
        if step is None:
            table.add_row(words, "none")
            continue
        one, other = (of[step] for of in values)
        shown = f"{one:.9g}", f"{other:.9g}", f"{_difference(one, other):.2g}"
        table.add_row(words, str(step), *shown)
    console.print(table)
    if differing is None:
        console.print("a run has no config.toml: their settings are not compared")
    elif not differing:
        console.print("their settings are the same")
    else:
        table = Table("setting", *runs)
        for name, pair in differing.items():
            table.add_row(name, *("" if value is None else str(value) for value in pair))
        console.print(table)
    console.print(f"drawn in {arguments.picture}")


if __name__ == "__main__":
    sys.exit(main())
