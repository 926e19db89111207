"""`python -m jaxpipe.bench.efficiency`: how much of two cores a pipeline uses, beside predictions.

For every schedule, on two processes of one thread, each pinned to its own core:

  measured  = (single-device step / 2) / pipeline step, forward and backward of all microbatches;
  predicted = (single-device step / 2) / lockstep of the simulator, from op times measured with
              both cores busy;
  PyTorch   = the same as measured, of torch.distributed.pipelining's schedule of that family,
              against PyTorch's own single-process step.

No optimizer is in any of the steps. All take turns in rounds, and a step in which other processes
used over 6 % of a core is made again. Exit codes: 0 done; 1 a measurement failed; 2 bad input.
"""

import argparse
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.bench.processes import BenchError, Group, seconds_and_loss
from jaxpipe.bench.steps import Rounds, Runner
from jaxpipe.bench.table import PP, Row, rounds_json, table
from jaxpipe.bench.workload import VARIANTS, WORKLOADS, OpTimes, Workload
from jaxpipe.schedule import ScheduleError

_PEER = Path(__file__).parent / "peers" / "torch_pipeline.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
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
    print(table(rows))
    if arguments.out:
        _save(arguments, rows, versions)
    return 0


def measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Start the competitors, and measure every schedule with every number of microbatches."""
    workload = WORKLOADS[arguments.workload]
    programs = {"jaxpipe": [sys.executable, "-m", "jaxpipe.bench.worker"]}
    if arguments.torch:
        programs["torch"] = [arguments.torch, str(_PEER)]
    groups = {}
    with ExitStack() as stack:
        for name, program in programs.items():
            for kind, size in ((f"{name} single", 1), (name, PP)):
                group = Group(kind, program, size, workload=msgspec.to_builtins(workload))
                groups[kind] = stack.enter_context(group)
        versions = {name: groups[name].versions[0]["ready"] for name in programs}
        rows = [
            row
            for microbatches in arguments.microbatches
            for row in _measure(groups, workload, arguments, microbatches)
        ]
    return rows, versions


def _measure(
    groups: Mapping[str, Group],
    workload: Workload,
    arguments: argparse.Namespace,
    microbatches: int,
) -> list[Row]:
    """Build every step, then take turns in rounds."""
    pipeline, layers = groups["jaxpipe"], workload.model.n_layers
    pipeline.ask("ops")  # compiles
    turns: dict[str, Callable[[], Any]] = {}
    rows, rounds, times = [], Rounds(), _mean_times(pipeline)
    for name in (name for name in ("jaxpipe single", "torch single") if name in groups):
        turns[name] = _built(groups[name], "single", microbatches=microbatches)
    turns["ops"] = lambda: _mean_times(pipeline)
    for variant in arguments.schedules:
        chosen = VARIANTS[variant]
        turns[f"jaxpipe {variant}"] = _built(
            pipeline, variant, microbatches=microbatches, variant=variant,
            times=msgspec.to_builtins(times),
        )  # fmt: skip
        if "torch" in groups and f"torch {chosen.peer}" not in turns:
            turns[f"torch {chosen.peer}"] = _built(
                groups["torch"], chosen.peer, microbatches=microbatches, schedule=chosen.peer
            )
        costs = chosen.costs(times, layers, PP, split=True)
        rows.append(Row(variant, chosen.build(PP, microbatches, costs), layers, rounds))
    runner = Runner(tuple(groups.values()))
    for number in range(arguments.rounds):
        runner.round(turns, rounds)
        print(f"round {number + 1} of M={microbatches}\n{table(rows)}", file=sys.stderr, flush=True)
    for turn in turns:
        for group in groups.values():
            group.ask("drop", name=turn.removeprefix("jaxpipe ").removeprefix("torch "))
    return rows


def _built(group: Group, name: str, **how: Any) -> Callable[[], float]:
    """Have a step built and run once; the turn that gives its seconds."""
    _, loss = seconds_and_loss(group.ask("build", name=name, **how))
    if not 0 < loss < 1e3:
        raise BenchError(f"{group.name}: the loss of {name} is {loss}.")
    return lambda: group.step(name)[0]


def _mean_times(group: Group) -> OpTimes:
    """Of the ops, over the ranks, which run them at the same time."""
    answers = group.ask("ops")
    return OpTimes(**{name: sum(a[name] for a in answers) / len(answers) for name in answers[0]})


def _save(arguments: argparse.Namespace, rows: Sequence[Row], versions: dict[str, str]) -> None:
    """The JSON file, and the table in markdown beside it."""
    command = (
        f"python -m jaxpipe.bench.efficiency --workload {arguments.workload} "
        f"--schedules {' '.join(arguments.schedules)} "
        f"--microbatches {' '.join(map(str, arguments.microbatches))} --rounds {arguments.rounds}"
    ) + (" --torch PYTHON" if arguments.torch else "")
    named = {"Python": platform.python_version(), "jax": versions["jaxpipe"]}
    named |= {"torch": versions["torch"]} if "torch" in versions else {}
    today = date.today().isoformat()
    found = {
        "date": today,
        "command": command,
        "versions": named,
        "workload": msgspec.to_builtins(WORKLOADS[arguments.workload]),
        "rows": [row.json() for row in rows],
        "rounds": {str(row.schedule.microbatches): rounds_json(row.rounds) for row in rows},
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    text = [
        f"# Pipeline efficiency on {PP} CPU cores, {today}",
        ", ".join(f"{name} {number}" for name, number in named.items())
        + f"; {arguments.workload}; one thread a rank, each on its own core; no optimizer.",
        f"`{command}`",
        table(rows),
        "Medians over rounds, least and largest round in brackets; `kept` counts the clean steps "
        "of this schedule and of the single device.",
    ]
    arguments.out.with_suffix(".md").write_text("\n\n".join(text) + "\n")


def _check(arguments: argparse.Namespace) -> None:
    """Raise `BenchError` or `ScheduleError` where the request cannot be met."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < PP:
        raise BenchError(f"this needs Linux and {PP} processor cores.")
    if arguments.rounds < 1:
        raise BenchError(f"--rounds {arguments.rounds} must be at least 1.")
    if arguments.torch and not shutil.which(arguments.torch):
        raise BenchError(f"--torch {arguments.torch} cannot be started: give a Python with torch.")
    if arguments.out and not arguments.out.parent.is_dir():
        raise BenchError(f"--out {arguments.out} cannot be written: its folder is missing.")
    for name in arguments.schedules:
        if name not in VARIANTS:
            raise BenchError(f"unknown schedule {name!r}: choose of {', '.join(VARIANTS)}.")
        for microbatches in arguments.microbatches:
            VARIANTS[name].build(PP, microbatches)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.bench.efficiency", description=__doc__)
    add = parser.add_argument
    add("--schedules", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    add("--microbatches", nargs="+", type=int, default=[8, 16], metavar="M", help="of a step")
    add("--rounds", type=int, default=3, help="how often every step is made (3)")
    add("--workload", choices=WORKLOADS, default="bench-S", help="sizes of the model (bench-S)")
    add("--torch", metavar="PYTHON", help="a Python with torch, to measure PyTorch as well")
    add("--out", type=Path, metavar="FILE.json", help="where to write all that was measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
