"""`bench show`: tables and pictures from the results that are kept, into the README.

Every `<!-- results NAME -->` line of the README is followed by the table of
`jaxpipe/bench/results/NAME.json`, up to `<!-- end -->`; the picture goes beside the JSON file.
"""

import argparse
import re
from pathlib import Path
from statistics import median

from jaxpipe.bench.goals import goals_table
from jaxpipe.bench.results import Result, Steps, table
from jaxpipe.bench.variants import VARIANTS
from jaxpipe.config import ConfigError

RESULTS = Path(__file__).parent / "results"
_MARKED = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file to fill in")


def run(arguments: argparse.Namespace) -> None:
    """Rewrite the tables of the file, and draw the pictures."""
    path = arguments.readme
    if not path.is_file():
        raise ConfigError(f"--readme {path}: there is no such file; run this where README.md is.")
    text = path.read_text()
    for _, name, _ in _MARKED.findall(text):
        draw(_read(name), RESULTS / f"{name}.svg")
    path.write_text(filled(text))


def filled(text: str) -> str:
    """The text with every marked table made anew."""
    return _MARKED.sub(lambda found: found[1] + _section(_read(found[2])) + found[3], text)


def _read(name: str) -> Result:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"<!-- results {name} -->: there is no {path.name} in {RESULTS}.")
    return Result.read(path)


def _section(result: Result) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    rounds = max(len(steps.rounds) for steps in result.steps)
    return (
        f"\n{result.date}, {result.machine}; {versions}; medians of {rounds} rounds. "
        f"`{result.command}`\n\n{table(result, spread=False)}\n\n{goals_table(result)}\n\n"
    )


def draw(result: Result, path: Path) -> None:
    """Efficiencies of every schedule beside the prediction and PyTorch's, by microbatches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(result.steps), 3.4), layout="constrained")
    every = figure.subplots(1, len(result.steps), sharey=True, squeeze=False)[0]
    for axes, steps in zip(every, result.steps):
        names = [name for name in result.variants() if steps.seconds(f"jaxpipe {name}")]
        for shift, (label, values) in enumerate(_bars(steps, names).items()):
            places = [i + 0.27 * (shift - 1) for i in range(len(names))]
            known = [(place, value) for place, value in zip(places, values) if value is not None]
            axes.barh(*zip(*known), height=0.25, label=label) if known else None
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"{steps.microbatches} microbatches", xlabel="efficiency", xlim=(0, 1.05))
        axes.grid(axis="x", alpha=0.3)
    every[0].invert_yaxis()
    every[0].legend(loc="lower left", fontsize="small")
    figure.savefig(path)


def _bars(steps: Steps, names: list[str]) -> dict[str, list[float | None]]:
    found = {
        "measured": [steps.efficiency("jaxpipe", name) for name in names],
        "predicted": [steps.predicted_efficiency(name) for name in names],
        "PyTorch": [steps.efficiency("torch", VARIANTS[name].peer) for name in names],
    }
    return {
        label: [median(values) if values else None for values in each]
        for label, each in found.items()
    }
