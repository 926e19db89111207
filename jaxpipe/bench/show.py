"""`bench show`: tables and pictures from the results that are kept, into the files that show them.

Every `<!-- results NAME -->` line of these is followed by the tables of
`jaxpipe/bench/results/NAME.json`, up to `<!-- end -->`, and a picture goes beside the JSON file;
`<!-- ops NAME -->` and `<!-- clockwork NAME -->` are the same for what `bench ops` and `bench
clockwork` wrote, without a picture, and `<!-- gpu NAME -->` for what `bench report` wrote: without
such a file it says how to make one.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec

from jaxpipe.bench import clockwork, costs, report
from jaxpipe.bench.options import markdown
from jaxpipe.bench.results import Result, Steps, table
from jaxpipe.bench.variants import VARIANTS
from jaxpipe.config import ConfigError

RESULTS = Path(__file__).parent / "results"
FILES = [Path("jaxpipe/bench/results/README.md")]
_MARKED = re.compile(r"(<!-- (results|ops|clockwork|gpu) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--files", type=Path, nargs="+", default=FILES, help="files to fill in")


def run(arguments: argparse.Namespace) -> None:
    """Rewrite the tables of the files, and draw the pictures."""
    for path in arguments.files:
        if not path.is_file():
            raise ConfigError(f"--files {path}: there is none; run this where README.md is.")
        text = path.read_text()
        for _, kind, name, _ in _MARKED.findall(text):
            if kind == "results":
                draw(Result.read(_file(kind, name)), RESULTS / f"{name}.svg")
        path.write_text(filled(text))


def filled(text: str) -> str:
    """The text with every marked table made anew."""
    sections = {"results": _steps, "ops": _ops, "clockwork": _clockwork, "gpu": _gpu}
    return _MARKED.sub(
        lambda found: found[1] + sections[found[2]](_file(found[2], found[3])) + found[4], text
    )


def _file(kind: str, name: str) -> Path:
    path = RESULTS / f"{name}.json"
    if not path.is_file() and kind != "gpu":
        raise ConfigError(f"<!-- {kind} {name} -->: there is no {path.name} in {RESULTS}.")
    return path


def _steps(path: Path) -> str:
    result = Result.read(path)
    rounds = max(len(steps.rounds) for steps in result.steps)
    return (
        f"\n{result.date}, {result.machine}; {_versions(result.versions)}; medians of {rounds} "
        f"rounds. `{result.command}`\n\n{table(result, spread=False)}\n\n"
    )


def _ops(path: Path) -> str:
    found = msgspec.json.decode(path.read_bytes())
    return (
        f"\n{found['date']}, {found['device']}; {_versions(found['versions'])}. "
        f"`{found['command']}`\n\n{markdown(costs.COLUMNS, costs.rows(found))}\n\n"
    )


def _clockwork(path: Path) -> str:
    found = msgspec.json.decode(path.read_bytes(), type=clockwork.Result)
    return (
        f"\n{found.date}, {found.machine}; {_versions(found.versions)}. `{found.command}`\n\n"
        f"{clockwork.table(found)}\n\n"
    )


def _gpu(path: Path) -> str:
    if not path.is_file():
        return "\nNot measured yet: `./launch/gpu_report.sh` on a machine with a GPU makes it.\n\n"
    return f"\n{report.table(msgspec.json.decode(path.read_bytes(), type=report.Result))}\n"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def draw(result: Result, path: Path) -> None:
    """Efficiencies of every schedule beside the prediction and PyTorch's, by microbatches."""
    import matplotlib
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
    with matplotlib.rc_context({"svg.hashsalt": "jaxpipe"}):  # the same file from the same result
        figure.savefig(path, metadata={"Date": None})


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
