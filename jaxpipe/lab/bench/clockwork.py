"""`bench clockwork`: timing of the executor alone, without the noise of matrix products.

Every pipeline rank is a process, and layers sleep instead of computing: F, B and W take a given
time. The rest of a step is the executor: its tables, its transfers, and ranks that wait for each
other. Permutes are phased where the simulator predicts a shorter step. Every step is compared with
the simulator's time and, with --torch, with PyTorch's schedule of the same family over modules that
sleep as long. The simulator's time of a message is that of one tick of the same step without sleep.

  idle = share of all ranks' time in a step without F, B or W.

Several processes may share a core: on a machine with other work, give the command priority
(`chrt -r 10`, as root).
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.core.schedule import lower, simulate
from jaxpipe.lab.bench import options
from jaxpipe.lab.bench.processes import ProcessGroup, list_programs, processor_name
from jaxpipe.lab.bench.sleeping import SleepingStep
from jaxpipe.lab.bench.variants import PEERS
from jaxpipe.schedules import ScheduleVariant, find_family

# Live microbatches per rank of the variants that run forwards ahead: more than 1F1B needs, and as
# many as the others hold.
_AHEAD = {
    "1f1b": lambda ranks: 2 * ranks - 1,
    "interleaved_1f1b": lambda ranks: 3 * ranks - 1,
    "dualpipev": lambda ranks: 2 * ranks,
}
_DEFAULT = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")


class ClockworkSteps(msgspec.Struct):
    """Step times of one schedule: measured, predicted by the simulator, and PyTorch's.

    Attributes:
        schedule: label of the variant.
        ranks: of the pipeline.
        microbatches: of each step.
        useful: seconds of F, B and W per rank.
        transfer: seconds of a message.
        predicted: seconds by the simulator.
        measured: seconds of each measured step.
        torch: the same of PyTorch; empty if not measured.
    """

    schedule: str
    ranks: int
    microbatches: int
    useful: float
    transfer: float
    predicted: float
    measured: list[float]
    torch: list[float] = []

    def cells(self) -> list[str]:
        """Return the cells of the table's row."""
        measured = median(self.measured)
        return [
            str(self.ranks), str(self.microbatches), f"`{self.schedule}`",
            f"{measured / self.predicted:.3f}", self._idle(measured), self._idle(self.predicted),
            self._idle(median(self.torch)) if self.torch else "",
        ]  # fmt: skip

    def _idle(self, seconds: float) -> str:
        return f"{1 - self.useful / seconds:.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--schedules", nargs="+", default=list(_DEFAULT), metavar="NAME")
    add("--ranks", nargs="+", type=int, default=[4, 8], metavar="P", help="processes (4 8)")
    add("--rounds", type=int, default=4, help="microbatches of a step for each rank (4)")
    add("--seconds", nargs=3, type=float, default=[0.02, 0.023, 0.017], metavar=("F", "B", "W"),
        help="of one microbatch on one rank (0.02 0.023 0.017)")  # fmt: skip
    add("--steps", type=int, default=3, help="measured of each (3)")
    options.add_torch(parser)
    options.add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure every schedule at every number of ranks, and print a table."""
    _check(arguments)
    programs = list_programs(arguments.torch)
    machine = f"{os.cpu_count()} cores of {processor_name()}"
    result = options.provenance(arguments) | {"machine": machine}
    measured = []
    for ranks in arguments.ranks:
        with ExitStack() as stack:
            groups = {
                name: stack.enter_context(ProcessGroup(name, program, ranks))
                for name, program in programs.items()
            }
            result["versions"] |= {n: g.version for n, g in groups.items() if n != "jaxpipe"}
            for variant in _list_variants(arguments, ranks):
                steps = _measure_variant(variant, ranks, arguments, groups)
                measured.append(steps)
                print(" ".join(filter(None, steps.cells())), flush=True)
    print("\n" + table(measured))
    options.write_json(result | {"steps": measured}, arguments.out)


def table(steps: Sequence[ClockworkSteps]) -> str:
    """Return the results as a Markdown table."""
    header = ("P", "M", "schedule", "measured / predicted", "idle", "by the simulator", "PyTorch's")
    return options.markdown_table(header, [one.cells() for one in steps])


def _measure_variant(
    variant: ScheduleVariant,
    ranks: int,
    arguments: argparse.Namespace,
    groups: dict[str, ProcessGroup],
) -> ClockworkSteps:
    work = SleepingStep(variant, ranks, ranks * arguments.rounds, *arguments.seconds)
    ours, peer, name = groups["jaxpipe"], PEERS.get(variant.family), variant.label
    ours.ask("build_sleeping", name=name, work=asdict(work))

    def steps(group: ProcessGroup, **how: Any) -> list[float]:
        return [group.step_seconds(name, **how) for _ in range(arguments.steps)]

    transfer = median(steps(ours, asleep=False)) / lower(work.schedule, work.lockstep).ticks
    costs = replace(work.costs, transfer=transfer)
    predicted = simulate(work.schedule, costs, work.lockstep).scan_makespan
    measured, torch = steps(ours), []
    if "torch" in groups and peer and not variant.in_flight:
        groups["torch"].ask("build_sleeping", name=name, schedule=peer, work=asdict(work))
        torch = steps(groups["torch"])
    return ClockworkSteps(
        name, ranks, work.microbatches, work.seconds, transfer, predicted, measured, torch
    )


def _list_variants(arguments: argparse.Namespace, ranks: int) -> Iterator[ScheduleVariant]:
    """Yield one variant of each family, and for some families one that runs forwards ahead."""
    for name in arguments.schedules:
        family = find_family(name)
        in_chunks = family.needs_equal_rounds and family.placement == "loop"
        in_order = ScheduleVariant(family.name, virtual_stages=2 if in_chunks else None)
        yield in_order
        if family.name in _AHEAD:
            yield in_order._replace(in_flight=_AHEAD[family.name](ranks))


def _check(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if the options are unsuitable."""
    options.check_positive(rounds=arguments.rounds, steps=arguments.steps)
    options.check_out(arguments.out)
    for name in arguments.schedules:
        if find_family(name).placement == "file":
            raise ConfigError(f"--schedules {name}: its orders are in a file; name another.")
    options.check_torch(arguments.torch)
    if min(arguments.ranks) < 2:
        raise ConfigError(f"--ranks {min(arguments.ranks)} must be at least 2.")
    if min(arguments.seconds) <= 0:
        raise ConfigError(f"--seconds {min(arguments.seconds):g} must be above 0.")
