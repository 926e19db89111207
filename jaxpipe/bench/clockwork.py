"""`bench clockwork`: the executor's clock, free of the noise of products.

Every rank is a process of its own, and layers sleep instead of computing: F, B and W take a given
time. What is left is the executor: its tables, its transfers, and who waits for whom. Neighbours
exchange by turns where the simulator finds that shorter. Beside every step stand the simulator's
seconds for it and, with --torch, PyTorch's schedule of that family over modules that sleep as long.
A message takes what a tick of the same step takes if nobody sleeps.

  idle = share of the time of all ranks in which a step leaves them without F, B or W.

With --fused-steps N each measured step is N that overlap, with updates that take no time.

Processes take turns on the cores: on a machine with other work, give the command priority over it
(`chrt -r 10`, as root).
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from jaxpipe.bench.options import add_out, at_least_one, check_out, markdown, write
from jaxpipe.bench.processes import Group, processor, seconds_of
from jaxpipe.bench.sleeping import Work
from jaxpipe.config import ConfigError
from jaxpipe.schedule import Variant, family_of, lower, simulate

_PEER = Path(__file__).parent / "peers" / "torch_clockwork.py"
_PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
# Forwards that a rank may hold where they run ahead: of 1F1B more than in its own order.
_AHEAD = {"1f1b": lambda ranks: 2 * ranks - 1, "dualpipev": lambda ranks: 2 * ranks}
_DEFAULT = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")


class Steps(msgspec.Struct):
    """Seconds of steps of one schedule, and of PyTorch's, beside those of the simulator."""

    schedule: str
    ranks: int
    microbatches: int
    useful: float  # of a rank, in a step
    transfer: float  # of a message
    predicted: float
    measured: list[float]
    torch: list[float] = []
    fused: int = 1  # so many that overlap, of so many microbatches each

    def idle(self, seconds: float) -> float:
        """The share of a step in which ranks have nothing to do."""
        return 1 - self.useful / seconds


class Result(msgspec.Struct):
    """What a call leaves: when and where it ran, with what, the command, and its steps."""

    date: str
    machine: str
    versions: dict[str, str]
    command: str
    steps: list[Steps]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--schedules", nargs="+", default=list(_DEFAULT), metavar="NAME")
    add("--ranks", nargs="+", type=int, default=[4, 8], metavar="P", help="processes (4 8)")
    add("--rounds", type=int, default=4, help="microbatches of a step for each rank (4)")
    add("--seconds", nargs=3, type=float, default=[0.02, 0.023, 0.017], metavar=("F", "B", "W"),
        help="of one microbatch on one rank (0.02 0.023 0.017)")  # fmt: skip
    add("--steps", type=int, default=3, help="measured of each (3)")
    add(
        "--fused-steps", type=int, default=1, metavar="N", help="that overlap, in each of these (1)"
    )
    add("--torch", metavar="PYTHON", help="a Python with torch, to measure beside")
    add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure every schedule at every number of ranks, and print a table."""
    _check(arguments)
    machine = f"{os.cpu_count()} cores of {processor()}"
    found = Result(f"{date.today():%F}", machine, {}, _command(arguments), [])
    for ranks in arguments.ranks:
        with ExitStack() as stack:
            programs = {"jaxpipe": [sys.executable, "-m", "jaxpipe.bench.sleeping"]}
            if arguments.torch:
                programs["torch"] = [arguments.torch, str(_PEER)]
            groups = {
                name: stack.enter_context(Group(name, program, ranks))
                for name, program in programs.items()
            }
            for name, group in groups.items():
                called = "jax" if name == "jaxpipe" else name
                found.versions[called] = group.versions[0]["ready"]
            for variant in _variants(arguments, ranks):
                steps = _measured(variant, ranks, arguments, groups)
                found.steps.append(steps)
                print(_line(steps), flush=True)
    print("\n" + table(found))
    write(msgspec.to_builtins(found), arguments.out)


def _measured(
    variant: Variant, ranks: int, arguments: argparse.Namespace, groups: dict[str, Group]
) -> Steps:
    work = work_of(variant, ranks, ranks * arguments.rounds, arguments.seconds)
    work = replace(work, steps=arguments.fused_steps)
    ours, name = groups["jaxpipe"], variant.label
    ours.ask("build", name=name, work=work.as_words())

    def steps(group: Group, **how: Any) -> list[float]:
        return [seconds_of(group.ask("step", name=name, **how)) for _ in range(arguments.steps)]

    transfer = median(steps(ours, asleep=False)) / lower(work.schedule, work.lockstep).ticks
    costs = replace(work.costs, transfer=transfer)
    predicted = simulate(work.schedule, costs, work.lockstep).scan_makespan
    found = Steps(name, ranks, work.microbatches, work.seconds, transfer, predicted, steps(ours))
    found.fused = work.steps
    if "torch" in groups and variant.family in _PEERS and not variant.in_flight:
        peer = _PEERS[variant.family]
        groups["torch"].ask("build", name=name, schedule=peer, work=work.as_words())
        found.torch = steps(groups["torch"])
    return found


def work_of(variant: Variant, ranks: int, microbatches: int, seconds: Sequence[float]) -> Work:
    """The step of a variant whose F, B and W take so many seconds of one microbatch on one rank."""
    options = {"virtual_stages": variant.virtual_stages} if variant.virtual_stages else {}
    return Work(variant.family, ranks, microbatches, *seconds, variant.in_flight, options)


def table(found: Result) -> str:
    """In Markdown."""
    header = ("P", "M", "schedule", "measured / predicted", "idle", "by the simulator", "PyTorch's")
    rows = [
        (
            str(one.ranks), f"{one.fused} x " * (one.fused > 1) + str(one.microbatches),
            f"`{one.schedule}`",
            f"{median(one.measured) / one.predicted:.3f}",
            f"{one.idle(median(one.measured)):.3f}",
            f"{one.idle(one.predicted):.3f}",
            f"{one.idle(median(one.torch)):.3f}" if one.torch else "",
        )
        for one in found.steps
    ]  # fmt: skip
    return markdown(header, rows)


def _line(steps: Steps) -> str:
    ratios = ", ".join(f"{one / steps.predicted:.3f}" for one in steps.measured)
    return (
        f"P={steps.ranks} {steps.schedule}: {steps.predicted:.3f} s predicted, "
        f"{steps.transfer * 1e3:.2f} ms a message; taken: {ratios} of that"
    )


def _variants(arguments: argparse.Namespace, ranks: int) -> Iterator[Variant]:
    """One of each family, and some also with forwards that run ahead."""
    for name in arguments.schedules:
        family = family_of(name)
        in_chunks = family.in_rounds and family.placement == "loop"
        yield Variant(family.name, virtual_stages=2 if in_chunks else None)
        if family.name in _AHEAD:
            yield Variant(family.name, in_flight=_AHEAD[family.name](ranks))


def _command(arguments: argparse.Namespace) -> str:
    a = arguments
    words = ["python -m jaxpipe.bench clockwork --schedules", *a.schedules]
    words += ["--ranks", *map(str, a.ranks), "--rounds", str(a.rounds)]
    words += ["--seconds", *(f"{each:g}" for each in a.seconds), "--steps", str(a.steps)]
    words += [f"--fused-steps {a.fused_steps}"] * (a.fused_steps > 1)
    return " ".join([*words, *(["--torch PYTHON"] if a.torch else [])])


def _check(arguments: argparse.Namespace) -> None:
    """Raise what says why the request cannot be met."""
    several = arguments.fused_steps > 1
    at_least_one(rounds=arguments.rounds, steps=arguments.steps, fused_steps=arguments.fused_steps)
    check_out(arguments.out)
    for name in arguments.schedules:
        if family_of(name).placement == "file":
            raise ConfigError(f"--schedules {name}: its orders are in a file; name another.")
        if several and family_of(name).placement == "both ways":
            raise ConfigError(
                f"--schedules {name} with --fused-steps {arguments.fused_steps}: every stage is on "
                f"two ranks, and its steps do not overlap; leave one of them out."
            )
    if several and arguments.torch:
        raise ConfigError(
            "--fused-steps with --torch: PyTorch's steps do not overlap; leave one out."
        )
    if min(arguments.ranks) < 2:
        raise ConfigError(f"--ranks {min(arguments.ranks)} must be at least 2.")
    if min(arguments.seconds) <= 0:
        raise ConfigError(f"--seconds {min(arguments.seconds):g} must be above 0.")
