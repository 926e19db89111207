"""`python -m jaxpipe.bench.efficiency`: how much of two cores a pipeline uses, beside predictions.

For every schedule, on two processes of one thread, each on its own core:

  measured  = (single-device step / 2) / pipeline step, forward and backward of all microbatches;
  predicted = (single-device step / 2) / lockstep of the simulator, from op times measured with
              both cores busy;
  torch     = the same as measured, of torch.distributed.pipelining's schedule of that family,
              against PyTorch's own single-process step.

No optimizer is in any of the steps. Single steps, ops and pipeline steps take turns, and a step in
which other processes used over 6 % of a core is dropped and made again. Exit codes: 0 done; 1 a
measurement failed; 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from jaxpipe.bench.processes import BenchError, Group, seconds_and_loss
from jaxpipe.bench.steps import Runner, Series
from jaxpipe.bench.workload import VARIANTS, WORKLOADS, OpTimes, Variant, Workload
from jaxpipe.schedule import Op, Schedule, ScheduleError, simulate

PP = 2
_PEER = Path(__file__).parent / "peers" / "torch_pipeline.py"
_COLUMNS = ("schedule", "M", "measured", "spread", "predicted", "measured/predicted", "torch",
            "torch spread", "kept")  # fmt: skip


@dataclass
class Row:
    """One schedule with one number of microbatches: its steps, and what the rounds saw."""

    variant: str
    microbatches: int
    schedule: Schedule
    series: dict[str, Series]
    op_times: list[OpTimes] = field(default_factory=list)

    def efficiency(self, whose: str) -> float:
        """Of `"jaxpipe"` or `"torch"`, each against its own single-device step."""
        single, pipeline = self.series[f"{whose} single"], self.series[whose]
        return single.median / PP / pipeline.median

    def spread(self, whose: str) -> tuple[float, float]:
        """Least and largest efficiency that a step had, against the median single step."""
        single, kept = self.series[f"{whose} single"].median, self.series[whose].kept
        return (single / PP / max(kept), single / PP / min(kept)) if kept else (0.0, 0.0)

    def predicted(self, layers: int) -> float:
        """The simulator's efficiency, from the median op times."""
        seconds = lockstep_seconds(self.variant, self.schedule, self.median_times(), layers)
        return self.series["jaxpipe single"].median / PP / seconds

    def median_times(self) -> OpTimes:
        """Seconds of every op, over rounds and ranks."""
        fields = OpTimes.__struct_fields__
        return OpTimes(**{f: median(getattr(t, f) for t in self.op_times) for f in fields})


def lockstep_seconds(variant: str, schedule: Schedule, times: OpTimes, layers: int) -> float:
    """Seconds of a step as the scan runs it, from the seconds of its ops."""
    chosen = VARIANTS[variant]
    split = any(
        action.op is Op.B for order in schedule.ranks for c in order for action in c.actions
    )
    costs = times.costs(chosen.layers(layers, schedule.pp), split=split)
    report = simulate(schedule, costs, transfer_ticks=1, in_flight=chosen.in_flight)
    return report.lockstep_makespan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
    except (BenchError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        rows, versions = measure(arguments)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    layers = WORKLOADS[arguments.workload].model.n_layers
    print(table(rows, layers))
    if arguments.out:
        _save(arguments, rows, versions)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Start the competitors, and measure every schedule with every number of microbatches."""
    workload = WORKLOADS[arguments.workload]
    jax_worker = [sys.executable, "-m", "jaxpipe.bench.worker"]
    torch_worker = [arguments.torch, str(_PEER)] if arguments.torch else None
    how = {"workload": msgspec.to_builtins(workload)}
    with ExitStack() as stack:
        groups = {}
        for name, program in (("jaxpipe", jax_worker), ("torch", torch_worker)):
            if program:
                for kind, size in ((f"{name} single", 1), (name, PP)):
                    groups[kind] = stack.enter_context(Group(kind, program, size, **how))
        runner = Runner(tuple(groups.values()))
        rows = [
            _measure_one(groups, runner, workload, variant, microbatches, arguments.rounds)
            for microbatches in arguments.microbatches
            for variant in arguments.schedules
        ]
        versions = {name: group.versions[0]["ready"] for name, group in groups.items()}
    return rows, versions


def _measure_one(
    groups: dict[str, Group],
    runner: Runner,
    workload: Workload,
    variant: str,
    microbatches: int,
    rounds: int,
) -> Row:
    """Build the steps of one schedule in all groups, then take turns."""
    chosen, layers = VARIANTS[variant], workload.model.n_layers
    times, turns = None, {}
    if chosen.searched:
        times = _mean_times(groups["jaxpipe"].ask("ops"))
    schedule = _build(chosen, microbatches, times, layers)
    for name, group in groups.items():
        how: dict[str, Any] = {"microbatches": microbatches}
        if name == "jaxpipe":
            how |= {"variant": variant, "times": times and msgspec.to_builtins(times)}
        elif name == "torch":
            how |= {"schedule": chosen.peer}
        _build_step(group, how)
        turns[name] = lambda group=group: group.step("step")[0]
    turns["ops"] = lambda: _mean_times(groups["jaxpipe"].ask("ops"))
    row = Row(variant, microbatches, schedule, {name: Series() for name in turns})
    groups["jaxpipe"].ask("ops")  # the first compiles
    for found in runner.rounds(rounds, turns, row.series):
        if "ops" in found:
            row.op_times.append(found["ops"])
    if not row.op_times:
        raise BenchError(f"{variant}: others used the machine all the time; try again later.")
    print(table([row], layers).splitlines()[-1], file=sys.stderr, flush=True)
    return row


def _build(chosen: Variant, microbatches: int, times: OpTimes | None, layers: int) -> Schedule:
    costs = times.costs(chosen.layers(layers, PP), split=True) if times else None
    return chosen.build(PP, microbatches, costs)


def _build_step(group: Group, how: dict[str, Any]) -> None:
    group.ask("drop", name="step")
    _, loss = seconds_and_loss(group.ask("build", name="step", **how))
    if not abs(loss) < 1e3:
        raise BenchError(f"{group.name}: the step's loss is {loss}.")


def _mean_times(answers: list[dict[str, float]]) -> OpTimes:
    """Over the ranks."""
    return OpTimes(**{name: sum(a[name] for a in answers) / len(answers) for name in answers[0]})


def table(rows: Sequence[Row], layers: int) -> str:
    """The results as a markdown table."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for row in rows:
        measured, predicted = row.efficiency("jaxpipe"), row.predicted(layers)
        cells = [row.variant, str(row.microbatches), f"{measured:.3f}"]
        cells += [_range(row.spread("jaxpipe")), f"{predicted:.3f}"]
        cells += [f"{measured / predicted:.3f}"]
        if "torch" in row.series:
            cells += [f"{row.efficiency('torch'):.3f}", _range(row.spread("torch"))]
        else:
            cells += ["", ""]
        kept = [f"{len(s.kept)}/{s.made}" for name, s in row.series.items() if name != "ops"]
        lines.append("| " + " | ".join([*cells, " ".join(kept)]) + " |")
    return "\n".join(lines)


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f}-{pair[1]:.3f}"


def _save(arguments: argparse.Namespace, rows: Sequence[Row], versions: dict[str, str]) -> None:
    workload = WORKLOADS[arguments.workload]
    layers = workload.model.n_layers
    found = {
        "date": date.today().isoformat(),
        "versions": versions | {"jaxpipe": version("jaxpipe") if False else "0.1.0"},
        "workload": msgspec.to_builtins(workload),
        "rows": [
            {
                "schedule": row.variant,
                "microbatches": row.microbatches,
                "measured": row.efficiency("jaxpipe"),
                "predicted": row.predicted(layers),
                "torch": row.efficiency("torch") if "torch" in row.series else None,
                "op_seconds": msgspec.to_builtins(row.median_times()),
                "steps": {name: s.summary() for name, s in row.series.items() if name != "ops"},
            }
            for row in rows
        ],
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def _check(arguments: argparse.Namespace) -> None:
    """Raise `BenchError` or `ScheduleError` where the request cannot be met."""
    workload = WORKLOADS[arguments.workload]
    for name in arguments.schedules:
        if name not in VARIANTS:
            raise BenchError(f"unknown schedule {name!r}: choose of {', '.join(VARIANTS)}.")
        chosen = VARIANTS[name]
        chosen.layers(workload.model.n_layers, PP)
        for microbatches in arguments.microbatches:
            if not chosen.searched:
                chosen.build(PP, microbatches)
    if arguments.rounds < 1:
        raise BenchError(f"--rounds {arguments.rounds} must be at least 1.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.bench.efficiency", description=__doc__)
    add = parser.add_argument
    add("--schedules", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    add("--microbatches", nargs="+", type=int, default=[8, 16], metavar="M")
    add("--rounds", type=int, default=3, help="times that every step is to be made (3)")
    add("--workload", choices=WORKLOADS, default="bench-S", help="sizes of the model (bench-S)")
    add("--torch", metavar="PYTHON", help="a Python with torch, to measure PyTorch as well")
    add("--out", type=Path, metavar="FILE.json", help="where to write all that was measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
