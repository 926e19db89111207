"""A schedule as a figure: the timeline of every rank, and below it the memory curves.

`timed_boxes` and `build_tracks` compute what is drawn, the other functions draw it. All boxes of a
colour are one path, so that tens of thousands of them take seconds and a small file.
"""

import html
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpipe.core.schedule.action import Cell, Op, Schedule, ScheduleError
from jaxpipe.core.schedule.cells import Costs
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.scan import scan_starts
from jaxpipe.core.schedule.simulate import asynchronous_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".pdf", ".png", ".html")
LOOKS = {  # Okabe and Ito's colours, W lightened: distinct to colour-blind readers and in print
    Op.F: ("F (forward)", (0.0, 0.45, 0.7)),
    Op.B: ("B (input gradient)", (0.0, 0.62, 0.45)),
    Op.W: ("W (weight gradient)", (0.94, 0.75, 0.29)),
    Op.BW: ("BW (full backward)", (0.84, 0.37, 0.0)),
    Op.R: ("R (recompute)", (0.34, 0.71, 0.91)),
    Op.U: ("U (update)", (0.8, 0.47, 0.65)),
}
_IDLE = {"facecolor": "#FAFAFA", "edgecolor": "#B0B0B0", "hatch": "/////", "linewidth": 0}
_STYLE = {"font.size": 8, "hatch.linewidth": 0.4, "savefig.dpi": 200, "svg.hashsalt": "jaxpipe"}
_STYLE |= {"legend.frameon": False, "legend.borderpad": 0, "legend.borderaxespad": 0}
_STYLE |= {"legend.title_fontsize": 10, "legend.labelspacing": 0.9, "axes.spines.top": False}
_STYLE |= {"axes.spines.right": False, "pdf.fonttype": 42}  # publishers refuse the default, Type 3
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 10.0, 0.75, 0.15, 0.78, 0.45  # inches, as is the next line
_RANK, _RANKS, _GAP, _CURVES = 0.3, 5.5, 0.1, 1.5  # heights: a rank, most for all ranks, curves
_HALF = 0.42  # half the height of a box, where the distance of ranks is 1
_DIGIT = 0.74  # width of a digit and its share of the margin, in font sizes
_PAGE = b"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>%b</title>
<style>svg {max-width: 100%%; height: auto}</style>\n%b</html>\n"""
_Floats = tuple[float, ...]


class Box(NamedTuple):
    """A non-empty cell with its start and end."""

    start: float
    end: float
    cell: Cell


class Track(NamedTuple):
    """What is drawn of one rank: times in the unit of the costs, memory in that of `memory`.

    Attributes:
      boxes: the non-empty cells.
      idle: (start, end) of the idle intervals from 0 to the schedule's end.
      phases: bounds of warm-up, steady and cool-down: 0, the start of the first gradient action,
        the end of the last F if that is later, the schedule's end.
      memory: (time, memory) wherever the live memory changes.
    """

    boxes: list[Box]
    idle: list[tuple[float, float]]
    phases: tuple[float, float, float, float]
    memory: list[tuple[float, float]]


def draw_figure(
    schedule: Schedule,
    path: Path | str,
    *,
    costs: Costs | None = None,
    lockstep: Lockstep | None = None,
    memory: tuple[float, float] = (1.0, 1.0),
    unit: str = "microbatches",
    source: str = "",
) -> None:
    """Draw the timeline and the memory curves of a schedule into a file.

    A cell with two actions is split, F on top; later chunks and mirrored microbatches are lighter.
    The same input gives the same bytes.

    Args:
      schedule: the schedule to draw.
      path: the file, whose suffix is .svg, .pdf, .png or .html.
      costs: times of the ops; the time axis has their unit. None: F, B and W take 1.
      lockstep: as in `timed_boxes`.
      memory: as in `build_tracks`.
      unit: the unit of `memory`, for the axis label.
      source: where the costs are from, for the title.

    Raises `ScheduleError` for another suffix, where the schedule cannot finish, and without
    matplotlib.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ScheduleError(f"{path.name}: a picture ends in one of {', '.join(_SUFFIXES)}.")
    rows = build_tracks(timed_boxes(schedule, costs or Costs(), lockstep), memory)
    title = _build_title(schedule, rows, " · lockstep" if lockstep else "")
    title += f" · {source}" if source else ""
    time = "time (one F, B or W = 1)" if costs is None else "time (unit of the costs)"
    try:
        from matplotlib import style
    except ImportError as error:
        raise ScheduleError(
            f"{path.name}: drawing needs the package matplotlib: pip install 'jaxpipe[pictures]'."
        ) from error
    with style.context(["default", _STYLE]):
        _save(_build_figure(schedule, rows, title, time, unit), path, title)


def timed_boxes(
    schedule: Schedule, costs: Costs, lockstep: Lockstep | None = None
) -> list[list[Box]]:
    """Return the timed cells of every rank, as the scan runs them, or asynchronously.

    With `lockstep` None every rank runs its cells as early as it can.

    Raises `ScheduleError` where the schedule cannot finish.
    """
    if lockstep is None:
        times = asynchronous_times(schedule, costs)
        return [[Box(*t, cell) for t, cell in zip(*rank)] for rank in zip(times, schedule.ranks)]
    grid, starts = scan_starts(schedule, costs, lockstep)
    return [
        [Box(t, t + costs.cell_time(cell), cell) for t, cell in zip(*rank) if cell.actions]
        for rank in zip(starts.T.tolist(), zip(*grid))
    ]


def build_tracks(lines: list[list[Box]], memory: tuple[float, float] = (1.0, 1.0)) -> list[Track]:
    """Return the track of every rank, from the result of `timed_boxes`.

    `memory` is the memory of a microbatch in a stage, first from the start of F to the end of B or
    BW, then from there to the end of W.
    """
    end = max(box.end for line in lines for box in line)
    rows = []
    for line in lines:
        stops, starts = [0.0, *(box.end for box in line)], [*(box.start for box in line), end]
        idle = [(stop, start) for stop, start in zip(stops, starts) if stop < start]
        first = next((box.start for box in line if box.cell.gradient), end)
        last = max([first, *(box.end for box in line if box.cell.forward)])
        rows.append(Track(line, idle, (0.0, first, last, end), _memory_curve(line, memory)))
    return rows


def _memory_curve(line: list[Box], memory: tuple[float, float]) -> list[tuple[float, float]]:
    change = {Op.B: memory[1] - memory[0], Op.W: -memory[1], Op.BW: -memory[0]}
    amounts, now = {0.0: 0.0}, 0.0
    for start, end, cell in line:
        if cell.forward:
            amounts[start] = now = now + memory[0]
        if cell.gradient:
            amounts[end] = now = now + change[cell.gradient.op]
    return list(amounts.items())


def _build_title(schedule: Schedule, rows: list[Track], clock: str) -> str:
    busy = sum(box.end - box.start for row in rows for box in row.boxes) / schedule.pp
    longest = max(row.boxes[-1].end - row.boxes[0].start for row in rows if row.boxes)
    share, span = (f"{abs(1 - busy / time):.1%}" for time in (rows[0].phases[-1], longest))
    name = f"{schedule.name}{clock} · P = {schedule.pp}, M = {schedule.microbatches}"
    also = f" ({span} of the longest rank's span)" if span != share else ""
    return f"{name} · bubble {share}{also}"


def _build_figure(
    schedule: Schedule, rows: list[Track], title: str, time: str, unit: str
) -> "Figure":
    from matplotlib.figure import Figure

    high = min(_RANK * len(rows), _RANKS)
    height = _BOTTOM + _CURVES + _GAP + high + _TOP
    left, right, gap = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH, 2 * _GAP / (high + _CURVES)
    figure = Figure(figsize=(_WIDTH, height))
    ranks, curves = figure.subplots(2, sharex=True, height_ratios=(high, _CURVES))
    figure.subplots_adjust(left, _BOTTOM / height, right, 1 - _TOP / height, hspace=gap)
    points = (right - left) * _WIDTH * 72 / rows[0].phases[-1], high * 72 / len(rows)
    ranks.set_ylabel("rank")
    _draw_ranks(ranks, schedule, rows, points)
    _draw_phases(ranks, rows, points[0])
    _draw_memory(curves, ranks, rows)
    chunks = ", all chunks" if schedule.stages > schedule.pp else ""
    curves.set(xlim=(0, rows[0].phases[-1]), xlabel=time, ylabel=f"held per rank{chunks}\n({unit})")
    figure.align_ylabels()
    figure.legend(title=title, ncols=9, alignment="left", loc=(left, 1 - (_TOP - 0.26) / height))
    return figure


def _draw_ranks(axes: "Axes", schedule: Schedule, rows: list[Track], points: _Floats) -> None:
    """Draw boxes and idle intervals; `points` is the size of a unit of time and of a rank."""
    corners, idle = (
        defaultdict(list),
        [],
    )  # (left, top, right, bottom), for boxes also the microbatch
    for rank, row in enumerate(rows):
        idle += [(start, rank - _HALF, end, rank + _HALF) for start, end in row.idle]
        for start, end, cell in row.boxes:
            edges = np.linspace(rank - _HALF, rank + _HALF, len(cell.actions) + 1)
            for (op, stage, microbatch), top, bottom in zip(cell.actions, edges, edges[1:]):
                kind = op, schedule.placement.chunk(stage, microbatch)
                corners[kind].append((start, top, end, bottom, microbatch))
    narrowest = min(box.end - box.start for row in rows for box in row.boxes) * points[0]
    seams = {"edgecolor": "white", "linewidth": 0.6 if narrowest > 3 else 0}
    last = max(shade for _, shade in corners)
    for op, shade in sorted(corners, key=lambda kind: [*LOOKS].index(kind[0])):
        name, base = LOOKS[op]
        colour = tuple(1 - (1 - part) * (1 - 0.5 * shade / max(1, last)) for part in base)
        label = None if shade and (op, 0) in corners else name
        _draw_rectangles(axes, corners[op, shade], facecolor=colour, label=label, **seams)
        _draw_numbers(axes, corners[op, shade], colour, points)
    if last:
        who = "later chunks" if schedule.placement.mirrored_from is None else "from the last rank"
        axes.bar(0, 0, color="#B8B8B8", label=f"lighter: {who}")
    _draw_rectangles(axes, idle, label="idle", **_IDLE)
    axes.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(0, len(rows), 1 + len(rows) // 40))
    axes.tick_params("both", length=0, pad=9, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_rectangles(axes: "Axes", corners: Sequence[_Floats], **looks: Any) -> None:
    from matplotlib import patches, path

    polygons = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, y0, x1, y1, *_ in corners]
    if polygons:
        outline = path.Path.make_compound_path_from_polys(np.array(polygons))
        axes.add_patch(patches.PathPatch(outline, **looks))


def _draw_numbers(
    axes: "Axes", corners: Sequence[_Floats], colour: _Floats, points: _Floats
) -> None:
    luminance = np.dot((0.2126, 0.7152, 0.0722), np.power(colour, 2.2))
    looks: dict[str, Any] = {"color": "white" if luminance < 0.18 else "black", "ha": "center"}
    digits = len(str(max(number for *_, number in corners)))
    for x0, y0, x1, y1, number in corners:
        size = min(7.5, (x1 - x0) * points[0] / (digits * _DIGIT), (y1 - y0) * points[1] * 0.9)
        if size >= 4.5:
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            axes.text(x, y, str(number), size=size, va="center_baseline", **looks)


def _draw_phases(axes: "Axes", rows: list[Track], points: float) -> None:
    """Draw the phase bounds as two stairs across the ranks, and the phase names that fit."""
    edges = np.arange(len(rows) + 1) - 0.5
    for bounds in zip(*(row.phases[1:3] for row in rows)):
        axes.stairs(bounds, edges, orientation="horizontal", baseline=None, color="black")
    names = ("warm-up", "steady", "cool-down")
    for name, start, end in zip(names, rows[0].phases, rows[0].phases[1:]):
        if (end - start) * points > 48:
            axes.text((start + end) / 2, -0.65, name, ha="center")


def _draw_memory(curves: "Axes", ranks: "Axes", rows: list[Track]) -> None:
    """Draw a step line per rank, thinner for later ranks, so that coinciding lines stay visible."""
    from matplotlib import colormaps

    colours = colormaps["viridis"](np.linspace(0, 0.9, len(rows)))
    widths = np.linspace(min(2.4, 0.8 + 8 / len(rows)), 0.8, len(rows))
    beside: dict[str, Any] = {"transform": ranks.get_yaxis_transform(), "clip_on": False}
    ranks.barh(range(len(rows)), 0.005, 2 * _HALF, -0.009, color=colours, **beside)
    highest = max(amount for row in rows for _, amount in row.memory)
    curves.axhline(highest, color="grey", linewidth=0.6, linestyle=":")
    curves.text(rows[0].phases[-1], highest * 1.03, f"peak {highest:.4g}", ha="right", va="bottom")
    for row, colour, width in zip(rows, colours, widths):
        times, amounts = zip(*row.memory)
        curves.step(times, amounts, where="post", color=colour, linewidth=width, clip_on=False)
        peak = np.argmax(amounts)
        curves.plot(times[peak], amounts[peak], "o", color=colour, markersize=2 + width)
    curves.set_ylim(0, highest * 1.2 or 1)
    ticks: Any = curves.yaxis.get_major_locator()
    ticks.set_params(integer=True)


def _save(figure: "Figure", path: Path, title: str) -> None:
    kind = path.suffix.lower().replace(".html", ".svg")[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata={"Title": title, **undated})
    content = file.getvalue()
    if path.suffix.lower() == ".html":
        content = _PAGE % (html.escape(title).encode(), content[content.index(b"<svg") :])
    path.write_bytes(content)
