"""A plan as one self-contained HTML file: the table, and the timeline of every schedule in it."""

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.estimate import Estimate
from jaxpipe.planning.limits import stage_memory
from jaxpipe.planning.table import Plan
from jaxpipe.schedules.timing.figure import LOOKS, timed_boxes

_MOMENTS = 1_000_000  # units of time in a step: finer than a screen shows, and short in the file


def write_plan_page(plan: Plan, path: Path, name: str, shown: str) -> None:
    """Write a plan into an HTML file that needs no network.

    Args:
      plan: to show.
      path: of the file.
      name: of the configuration, for the title.
      shown: label of the schedule that is drawn first.

    Raises `ConfigError` if the file cannot be written.
    """
    write_page(path, f"plan of {name}", "jaxpipe.planning", "plan.js", plan_data(plan, shown))


def write_page(path: Path, title: str, package: str, script: str, data: dict[str, Any]) -> None:
    """Write the page that a script of a package draws of `data`, with all it needs in the file.

    Raises `ConfigError` if the file cannot be written.
    """
    parts = {
        "title": html.escape(title),
        "canvas.js": _read("jaxpipe.planning", "canvas.js"),
        "script": _read(package, script),
        # The only sequence that could end the element early is one with a "<".
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = _read("jaxpipe.planning", "page.html")
    for part, text in parts.items():
        page = page.replace(f"{{{{{part}}}}}", text, 1)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another.") from error


def _read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def plan_data(plan: Plan, shown: str) -> dict[str, Any]:
    """Return what the page of a plan shows, in plain types.

    `plan` is `Plan.as_json`; `columns` and `timelines` are in the order of its `schedules`.
    """
    return {
        "plan": plan.as_json(),
        "shown": shown,
        "summary": plan.summary,
        "sentences": [*plan.sentences(), *plan.refusals()],
        "columns": [
            {
                "name": column.name,
                "legend": column.legend,
                "values": [column.value(one) for one in plan.estimates],
                "texts": [column.text(one) for one in plan.estimates],
            }
            for column in plan.columns
        ],
        "ops": [
            {"name": op.name, "what": what, "colour": [round(255 * part) for part in colour]}
            for op, (what, colour) in LOOKS.items()
        ],
        "timelines": [_timeline(one) for one in plan.estimates],
    }


def _timeline(one: Estimate) -> dict[str, Any]:
    """Return the cells of a schedule as the scan runs them.

    `ranks` has of every pipeline rank the cells in order, each `[start, end, op, stage,
    microbatch]`, where a second action adds three more numbers. Times are in `unit` seconds, an op
    is an index of `LOOKS`. `chunks` are the chunk of each stage, where it is not mirrored.
    """
    run, ops = one.plan, {op: index for index, op in enumerate(LOOKS)}
    schedule, placement = run.schedule, run.schedule.placement
    lines = timed_boxes(schedule, run.costs, run.lockstep)
    unit = max(box.end for line in lines for box in line) / _MOMENTS
    memory = stage_memory(run.config, run.layout)
    return {
        "unit": unit,
        "stages": schedule.stages,
        "slices": schedule.slices,
        "chunks": [placement.chunk(stage) for stage in range(schedule.stages)],
        "stored_chunks": placement.stored_chunks,
        "mirrored_from": placement.mirrored_from,
        "memory": {"F": memory.F, "B": memory.B, "W": memory.W, "state": memory.state},
        "message": costs_of(run.config).message,
        "ranks": [
            [
                [
                    round(box.start / unit), round(box.end / unit),
                    *(part for op, *at in box.cell.actions for part in (ops[op], *at)),
                ]
                for box in line
            ]
            for line in lines
        ],
    }  # fmt: skip
