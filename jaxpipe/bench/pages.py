"""`bench pages`: the pictures and the timelines of the READMEs, drawn by the code they tell of.

Draws three SVG files: a schedule, the way of the data through a step, and the loss of a quickstart
run. Every `<!-- timeline NAME option=value ... -->` line of a README is followed by the timeline of
that schedule, up to `<!-- end -->`; the word `ticks` adds a line that numbers them.
"""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.config import ConfigError
from jaxpipe.schedule import Lockstep, build, fused, timeline
from jaxpipe.schedule.picture import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUSE = Path(__file__).parents[1]
SCHEDULE = HOUSE / "schedule" / "zb_h1.svg"
STEP = HOUSE / "pipeline" / "step.svg"
CURVE = HOUSE / "bench" / "results" / "quickstart.svg"
LOG = CURVE.with_suffix(".jsonl")  # the losses of the run that the curve shows
_FIELDS = ("step", "loss", "eval_loss")
_LOCKSTEP = ("in_flight", "transfer_ticks")  # options of the timeline; the others are the builder's
_MARKED = re.compile(r"(<!-- timeline ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "jaxpipe"}
_BLUE, _GREEN, _ORANGE, _GREY = "#D6E6F4", "#D5EEE4", "#FBE3D0", "#EEEEEE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--log", type=Path, metavar="METRICS", help="keep the losses of this run's metrics.jsonl"
    )


def run(arguments: argparse.Namespace) -> None:
    """Draw the pictures and fill in the timelines of all READMEs."""
    if arguments.log:
        keep(arguments.log)
    from matplotlib import style

    draw_schedule(SCHEDULE)
    with style.context(["default", _STYLE]):
        draw_step(STEP)
        draw_curve(LOG, CURVE)
    for page in pages():
        page.write_text(filled(page.read_text()))


def pages() -> list[Path]:
    """The READMEs of the project: the front page first, then the house and its rooms."""
    front = [HOUSE.parent / "README.md", *HOUSE.parent.glob("tests/README.md")]
    return [*front, *sorted(HOUSE.rglob("README.md"))]


def filled(text: str) -> str:
    """The text with every marked timeline drawn anew."""
    return _MARKED.sub(
        lambda found: f"{found[1]}\n```\n{marked_timeline(found[2])}\n```\n\n{found[3]}", text
    )


def marked_timeline(words: str) -> str:
    """The timeline of a marker.

    >>> print(marked_timeline("gpipe pp=2 microbatches=2 ticks"))
    tick     0  1  2  3   4   5
    rank 0 | F0 F1 .  .   BW0 BW1
    rank 1 | .  F0 F1 BW0 BW1 .
    """
    name, *rest = words.split()
    numbered = "ticks" in rest
    options = {key: int(value) for key, value in (w.split("=") for w in rest if w != "ticks")}
    steps = options.pop("fused_steps", 0)
    lockstep = {key: options.pop(key) for key in _LOCKSTEP if key in options}
    one = build(name, **options)
    drawn = timeline(fused(one, steps) if steps else one, Lockstep(**lockstep))
    return f"{_numbers(drawn)}\n{drawn}" if numbered else drawn


def _numbers(drawn: str) -> str:
    """A line with the number of every tick above its column."""
    lines = drawn.splitlines()
    start = lines[0].index("|") + 2
    words = (match.start() for line in lines for match in re.finditer(r"\S+", line))
    columns = sorted({place for place in words if place >= start})
    header = "tick"
    for tick, place in enumerate(columns):
        header = f"{header:{place}}{tick}"
    return header


def keep(log: Path) -> None:
    """Keep the losses of a run: of its metrics.jsonl the fields that the curve needs."""
    if not log.is_file():
        raise ConfigError(f"--log {log}: there is none; name the metrics.jsonl of a run.")
    rows = map(json.loads, log.read_text().splitlines())
    kept = [{name: row[name] for name in _FIELDS if name in row} for row in rows]
    LOG.write_text("".join(f"{json.dumps(row)}\n" for row in kept))


def draw_schedule(path: Path) -> None:
    """ZB-H1 on four ranks, tick by tick, and what every rank holds."""
    picture(build("zb_h1", pp=4, microbatches=6), path, lockstep=Lockstep())


def draw_curve(log: Path, path: Path) -> None:
    """The training loss of every step and the held-out losses of a log that `keep` has written."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    heldout = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    axes = _axes(6.4, 3.0)
    axes.plot(*zip(*((row["step"], row["loss"]) for row in rows)), label="training", linewidth=1)
    axes.plot(*zip(*heldout), "o", label="held out", color="C1", markersize=4)
    for step, loss in heldout:
        axes.annotate(f"{loss:.2f}", (step, loss), (0, 6), textcoords="offset points", ha="center")
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(1.5, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(axes, path)


def draw_step(path: Path) -> None:
    """From token files to a checkpoint: what happens to a batch in one step."""
    axes = _axes(9.6, 4.4)
    axes.set(xlim=(0, 97), ylim=(-5, 39))
    axes.axis("off")
    _box(axes, (1, 22, 12, 10), "token files\n\nsamples of\nL + 1 tokens", _GREY)
    _box(axes, (16, 22, 12, 10), "batch\n\n[M, B, L]\nB cut over dp", _GREY)
    _box(axes, (31, 7, 47, 31), "", "white")
    axes.text(54.5, 36, "one jitted program on every device", ha="center", va="center")
    _box(axes, (35, 29.5, 39, 4.5), "tables: for every tick, what each rank does", _GREY)
    axes.text(54.5, 27.3, "scan over ticks", ha="center", va="center", style="italic")
    names = ("embedding\nlayers", "layers", "layers", "layers\nloss")
    for rank, name in enumerate(names):
        _box(axes, (33 + 11.4 * rank, 16, 8.8, 9.5), f"rank {rank}\n{name}", _BLUE)
    for rank in range(3):
        left, right = 41.8 + 11.4 * rank, 44.4 + 11.4 * rank
        _arrow(axes, (left, 22.5), (right, 22.5), "y")
        _arrow(axes, (right, 18.2), (left, 18.2), "dy")
    text = "gradients: each rank adds up those of its microbatches"
    _box(axes, (33, 9, 43, 4.5), text, _GREEN)
    _box(axes, (82, 22, 14, 10), "update\n\nsum over dp,\nclip, optimizer", _ORANGE)
    _box(axes, (82, 8.5, 14, 8.5), "state\n\nparameters,\nmoments", _ORANGE)
    _box(axes, (82, -4.5, 14, 8.5), "checkpoint\n\nby layer\nand name", _GREY)
    for start, end in (
        [(13, 27), (16, 27)], [(28, 27), (31, 27)], [(78, 27), (82, 27)],
        [(89, 22), (89, 17)], [(82, 12.7), (78, 12.7)], [(89, 8.5), (89, 4)],
    ):  # fmt: skip
        _arrow(axes, start, end)
    _save(axes, path)


def _axes(width: float, height: float) -> "Axes":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


def _box(axes: "Axes", place: tuple[float, float, float, float], text: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, bottom, width, height = place
    shape = {"boxstyle": "round,pad=0,rounding_size=0.8", "edgecolor": "#606060"}
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, facecolor=colour, **shape))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", size=8)


def _arrow(
    axes: "Axes", start: tuple[float, float], end: tuple[float, float], label: str = ""
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0})
    middle = (start[0] + end[0]) / 2
    axes.text(middle, start[1] + 0.6, label, ha="center", va="bottom", size=8)


def _save(axes: "Axes", path: Path) -> None:
    axes.figure.savefig(path, metadata={"Date": None})
