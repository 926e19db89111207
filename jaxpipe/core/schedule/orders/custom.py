"""Schedules from and to files, in PyTorch's notation: one row per rank.

A CSV file has a row per rank, such as `0F0, 0F1, 0I0, 0W0, 0B1`; empty cells are idle time and are
skipped. A JSON file has the same rows as a list of lists. `(0F7;3B2)OVERLAP_F_B` is one cell.
Sequence slices are written as microbatches; the number of slices per sequence is not in the file.
"""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.validate import validate

_OPS = {op.value: op for op in Op}
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_PAIR = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")


def read_schedule(path: str | Path, *, slices: int = 1) -> Schedule:
    """Read and validate a schedule from a `.csv` or `.json` file.

    The placement follows from the ranks of the forwards. `slices` consecutive microbatches are one
    sequence.

    Raises `ScheduleError`, naming file and cell, where the file cannot be read or parsed, or the
    schedule is not complete, well placed and free of deadlock.
    """
    path = Path(path)
    return _build(path, _read_rows(path), slices)


def _read_rows(path: Path) -> list[list[object]]:
    """Return the cells of every rank, of which there is at least one, unparsed."""
    try:
        text = path.read_text()
        rows = json.loads(text) if path.suffix == ".json" else list(csv.reader(text.splitlines()))
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise ScheduleError(f"{path}: is not valid {path.suffix[1:]}: {error}.") from error
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)):
        raise ScheduleError(f"{path}: needs a row for each rank, and has none.")
    while len(rows) > 1 and not any(rows[-1]):
        rows.pop()  # empty lines at the end of a file
    return rows


def _build(path: Path, rows: list[list[object]], slices: int) -> Schedule:
    """Return the valid schedule of the rows of a file."""
    orders = [
        [
            parse_cell(str(text).strip(), f"{path}, rank {rank}, cell {column}")
            for column, text in enumerate(row)
            if text and str(text).strip()
        ]
        for rank, row in enumerate(rows)
    ]
    schedule = replace(_infer_placement(path.stem, orders, str(path)), slices=slices)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return schedule


def build_custom(
    pp: int, microbatches: int, *, path: str | Path | None = None, slices: int = 1
) -> Schedule:
    """Read a schedule from a file and check that it is for `pp` ranks and `microbatches`.

    Raises `ScheduleError` for a file of other sizes, and as `read` does.
    """
    if path is None:
        raise ScheduleError("custom needs a path: give the .csv or .json file of the schedule.")
    path = Path(path)
    rows = _read_rows(path)
    if len(rows) != pp:
        raise ScheduleError(
            f"{path}: has the orders of {len(rows)} pipeline ranks, one in each row, but pp={pp}: "
            f"change one or the other."
        )
    schedule = _build(path, rows, slices)
    if schedule.microbatches != microbatches * slices:
        cut = f" of {slices} slices" if slices > 1 else ""
        raise ScheduleError(
            f"{path}: is for pp={schedule.pp} and microbatches={schedule.microbatches // slices}"
            f"{cut}, not for pp={pp} and microbatches={microbatches}{cut}: change one or the other."
        )
    return schedule


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as `.csv` or `.json`, for `read`.

    Raises `ScheduleError` for fused steps and for R: the notation has no letter for either.
    """
    if schedule.updates:
        raise ScheduleError(
            f"{path}: the notation of files has no updates: write the schedule of one step."
        )
    if schedule.recomputes:
        raise ScheduleError(
            f"{path}: the notation of files has no R: write the schedule without it; "
            f"`recompute_ahead` adds it again."
        )
    path, rows = Path(path), schedule.notation()
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def parse_cell(text: str, where: str = "cell") -> Cell:
    """Parse one cell; `where` is its position, for the error message.

    >>> parse_cell("3I2").gradient
    Action(op=<Op.B: 'I'>, stage=3, microbatch=2)
    """
    pair = _PAIR.fullmatch(text)
    actions = [_parse_action(part.strip(), where) for part in (pair.groups() if pair else [text])]
    if not pair:
        return Cell.from_action(actions[0])
    forward, gradient = actions
    if forward.op is not Op.F or gradient.op is Op.F:
        raise ScheduleError(f"{where}: {text} must pair an F with an I, W or B, in this order.")
    return Cell(forward, gradient)


def _parse_action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if not match:
        raise ScheduleError(
            f"{where}: {text!r} is no action: write stage, F, I, W or B, microbatch, such as 0F3."
        )
    return Action(_OPS[match[2]], int(match[1]), int(match[3]))


def _infer_placement(name: str, orders: list[list[Cell]], where: str) -> Schedule:
    """Return a schedule whose placement, mirrored or not, is inferred from its forwards."""
    actions = [(r, action) for r, order in enumerate(orders) for c in order for action in c.actions]
    forwards = {(a.stage, a.microbatch): r for r, a in actions if a.op is Op.F}
    if not forwards:
        raise ScheduleError(f"{where}: holds no forward action.")
    stages = 1 + max(action.stage for _, action in actions)
    microbatches = 1 + max(action.microbatch for _, action in actions)
    # Looked for one by one: in a file with a wrong number it is found long before the last one.
    every = ((s, m) for s in range(stages) for m in range(microbatches))
    if missing := next((pair for pair in every if pair not in forwards), None):
        raise ScheduleError(
            f"{where}: {missing[0]}F{missing[1]} is missing: each of the stages up to {stages - 1} "
            f"needs its forwards of the microbatches up to {microbatches - 1}."
        )
    down = tuple(forwards[s, 0] for s in range(stages))
    turned = [m for m in range(microbatches) if forwards.get((0, m), down[0]) != down[0]]
    placement = Placement(down, mirrored_from=min(turned) if turned else None)
    return Schedule.from_orders(name, placement, microbatches, orders)
