"""The numbers of a run as one self-contained HTML file, from its metrics.jsonl."""

from datetime import timedelta
from typing import Any, NamedTuple

from jaxpipe.config import mask_secrets
from jaxpipe.planning.page import write_page
from jaxpipe.run.watch.status import check_directory, config_of, name_of, records, status
from jaxpipe.runtime.storage.files import AnyPath, open_path

_BUCKETS = 2000  # of a series; a screen has about as many columns


class _Panel(NamedTuple):
    """A chart of the page: its metrics, and what the index of a metric that is a list counts."""

    title: str
    metrics: tuple[str, ...]
    counted: str = "process"


_PANELS = (
    _Panel("loss", ("loss", "eval_loss", "mtp_loss")),
    _Panel("learning rate", ("lr",)),
    _Panel("gradient norm", ("grad_norm",)),
    _Panel("tokens/s", ("tokens_per_second",)),
    _Panel("step [s]", ("step_seconds", "data_seconds")),
    _Panel("time of a step that the slowest process costs [s]", ("lost_seconds",)),
    _Panel("devices wait for their data loader [s]", ("data_idle_seconds",)),
    _Panel("devices wait for their host [s]", ("host_idle_seconds",)),
    _Panel("time that ops and links of each rank cost a step [s]", ("rank_lost_seconds",), "rank"),
)


def write_report(run_dir: str) -> str:
    """Write `<run_dir>/report.html` and return a line that names it.

    Raises `ConfigError` if the directory is not that of a run, or cannot be written.
    """
    directory = open_path(run_dir)
    check_directory(directory)
    path = directory / "report.html"
    title = f"run {name_of(directory)}"
    write_page(path, title, "jaxpipe.run.watch", "report.js", report_data(directory))
    return f"wrote {path}: open it in a browser"


def report_data(directory: AnyPath) -> dict[str, Any]:
    """Return what the page shows: the run's state, its config.toml, and panels of series.

    A series has points `[step, value]`. A metric that is a list has a series per index. A series of
    many steps keeps the least and the greatest value of every `ceil(steps / 2000)` steps, so a
    spike stays visible.
    """
    found, last, seconds = [dict[str, list[list[float]]]() for _ in _PANELS], 0, 0.0
    for record in records(directory):
        last = record["step"]
        seconds += record.get("step_seconds") or 0.0
        for panel, series in zip(_PANELS, found):
            for metric in panel.metrics:
                value = record.get(metric)
                labelled = {metric: value}
                if isinstance(value, list):
                    labelled = {f"{panel.counted} {i}": number for i, number in enumerate(value)}
                for label, number in labelled.items():
                    if number is not None:
                        series.setdefault(label, []).append([last, number])
    panels = [
        {
            "title": panel.title,
            "series": [{"label": label, "points": _thin(of)} for label, of in series.items()],
        }
        for panel, series in zip(_PANELS, found)
        if series
    ]
    summary = status(str(directory)).splitlines()
    if seconds:
        summary.append(f"the logged steps took {timedelta(seconds=round(seconds))} in all")
    about = mask_secrets({"summary": summary, "config": config_of(directory)})
    return about | {"steps": last, "panels": panels}


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Keep the least and the greatest value of every bucket, in order of steps."""
    size = -(-len(points) // _BUCKETS)
    if size == 1:
        return points
    buckets = (points[at : at + size] for at in range(0, len(points), size))
    ends = ((min(of, key=_value), max(of, key=_value)) for of in buckets)
    return [point for pair in ends for point in sorted(pair)]


def _value(point: list[float]) -> float:
    return point[1]
