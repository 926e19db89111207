"""`bench step`: training steps of every schedule, against predictions, one device and PyTorch.

Two processes of one thread, each pinned to its own core, run full training steps: forward, backward
and AdamW. Every schedule is compared with the simulator's step time, from ops timed just before and
after the step with both cores busy; with one device, which sums gradients over a scan; with data
parallelism on the same two cores; and with PyTorch's schedule of the same family, which starts from
the same values and tokens and must reach the same losses.

  efficiency = (single-device step / 2) / step, within a round; then the median over rounds.

  bubble = share of both cores' time during a step in which the ranks used no CPU.

All steps take turns in rounds. A step is repeated if other processes used over 6 % of a core in it.
Memory is measured last, every schedule in fresh processes.
"""

import argparse
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxpipe import config as configs
from jaxpipe.bench.options import add_config, add_out, check_out, check_positive
from jaxpipe.bench.processes import (
    BenchError,
    ProcessGroup,
    framework_versions,
    processor_name,
    step_losses,
    step_seconds,
)
from jaxpipe.bench.results import PeakMemory, StepMeasurements, StepResult, table
from jaxpipe.bench.rounds import Rounds, Runner
from jaxpipe.bench.variants import (
    CPUS,
    DEFAULT,
    PP,
    VARIANTS,
    data_parallel_config,
    predict_seconds,
    single_config,
)
from jaxpipe.config import Config, ConfigError
from jaxpipe.planning import OpSeconds, resolve
from jaxpipe.planning.checks import check_settings

_PEER = Path(__file__).parent / "peers" / "torch_pipeline.py"
_OPS = "ops after "  # in names of turns
_AGREE = 1e-4  # losses of both frameworks, relative


@dataclass(frozen=True)
class BenchEntry:
    """A step to measure: its name, the group of processes that runs it, and its `build` command."""

    name: str
    group: str
    build: dict[str, Any]


class StepTiming(NamedTuple):
    """Seconds of a step, and CPU seconds (`busy`) of its processes together."""

    seconds: float
    busy: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add_config(parser, "configs/bench_s.toml")
    add("--schedules", nargs="+", default=list(DEFAULT), metavar="NAME", help=", ".join(VARIANTS))
    add("--microbatches", nargs="+", type=int, default=[8, 16], metavar="M", help="of a step")
    add("--rounds", type=int, default=3, help="how often every step is made (3)")
    add("--patience", type=float, default=30, help="longest wait for a quiet machine, seconds (30)")
    add("--torch", metavar="PYTHON", help="a Python with torch, to measure PyTorch as well")
    add("--memory", type=int, nargs="*", default=[], metavar="M", help="measure memory at these M")
    add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = configs.load(arguments.config, arguments.overrides)
    _check(arguments, config)
    with tempfile.TemporaryDirectory() as directory:
        for result in _Bench(arguments, config, Path(directory)).results():
            if arguments.out:
                result.write(arguments.out)
    print(table(result))


class _Bench:
    """One run of the command; `directory` is for files that the processes exchange."""

    def __init__(self, arguments: argparse.Namespace, config: Config, directory: Path):
        self.arguments, self.config, self.directory = arguments, config, directory
        self.programs = {"jaxpipe": [sys.executable, "-m", "jaxpipe.bench.worker"]}
        if arguments.torch:
            self.programs["torch"] = [arguments.torch, str(_PEER)]
        self.ops: list[dict[str, Any]] = []

    def results(self) -> Iterator[StepResult]:
        """Yield the results so far, after each number of microbatches and at the end."""
        steps: list[StepMeasurements] = []
        with ExitStack() as stack:
            groups = {}
            for program in self.programs:
                for kind, size in ((f"{program} single", 1), (program, PP)):
                    groups[kind] = stack.enter_context(
                        ProcessGroup(kind, self.programs[program], size)
                    )
            versions = framework_versions(groups[name] for name in self.programs)
            for microbatches in self.arguments.microbatches:
                steps.append(self._steps(groups, microbatches))
                yield self._result(versions, steps)
        self._measure_memory(steps)
        yield self._result(versions, steps)

    def _result(self, versions: dict[str, str], steps: list[StepMeasurements]) -> StepResult:
        train = self.config.train
        return StepResult(
            date=date.today().isoformat(),
            command=self.arguments.line,
            versions={"Python": platform.python_version(), **versions},
            machine=f"{PP} cores of {processor_name()}, one thread a rank",
            tokens=train.microbatch_size * train.seq_len,
            ops=self.ops,
            steps=steps,
        )

    def _steps(self, groups: Mapping[str, ProcessGroup], microbatches: int) -> StepMeasurements:
        """Build every step, check its losses, then measure all steps in rounds."""
        seconds, _ = _without_update(self._op_seconds(groups))
        costs = self.directory / "costs.json"
        costs.write_bytes(msgspec.json.encode({"seconds": seconds}))
        entries = self._entries(microbatches, costs)
        losses, compiled = {}, {}
        for entry in entries:
            group = _wake_group(groups, entry.group)
            answers = group.ask("build", name=entry.name, **entry.build)
            losses[entry.name] = step_losses(answers, "losses")
            if "compile" in answers[0]:
                compiled[entry.name] = max(answer["compile"] for answer in answers)
            _check_losses(entry.name, losses[entry.name], losses["jaxpipe single"])
        turns: dict[str, Callable[[], Any]] = {}
        for entry in entries:
            turns[entry.name] = _turn(groups, entry)
            if entry.group == "jaxpipe":
                turns[_steps_after(entry)] = lambda: self._op_seconds(groups)
        runner = Runner(tuple(groups.values()), patience=self.arguments.patience)
        rounds = Rounds()
        for number in range(self.arguments.rounds):
            runner.round(turns, rounds)
            print(f"round {number + 1} of M={microbatches} done", file=sys.stderr, flush=True)
        for entry in entries:
            groups[entry.group].ask("drop", name=entry.name)
        self.ops += [ops for name in turns if name.startswith(_OPS) for ops in rounds.kept(name)]
        named = {entry.name for entry in entries}
        taken = [{k: v for k, v in results.items() if k in named} for results in rounds.rounds]
        return StepMeasurements(
            microbatches,
            rounds=[{name: step.seconds for name, step in results.items()} for results in taken],
            busy=[{name: step.busy for name, step in results.items()} for results in taken],
            predicted=[
                self._predicted(entries, results, microbatches, costs) for results in rounds.rounds
            ],
            tried={name: rounds.tried[name] for name in turns if name in named},
            losses=losses,
            compile=compiled,
            memory={},
        )

    def _entries(self, microbatches: int, costs: Path) -> list[BenchEntry]:
        """Return all steps; jaxpipe on one device comes first, since all losses must equal its."""
        single = _builtins(single_config(self.config, microbatches))
        double = _builtins(data_parallel_config(self.config, microbatches))
        entries = [
            BenchEntry(
                "jaxpipe single", "jaxpipe single", {"kind": "accumulated", "config": single}
            ),
            BenchEntry("jaxpipe data parallel", "jaxpipe", {"kind": "trained", "config": double}),
        ]
        for name in self.arguments.schedules:
            config = _builtins(VARIANTS[name].config(self.config, microbatches, costs))
            entries.append(
                BenchEntry(f"jaxpipe {name}", "jaxpipe", {"kind": "trained", "config": config})
            )
        if "torch" not in self.programs:
            return entries
        values = self.directory / f"values-{microbatches}.npz"
        with ProcessGroup("values", self.programs["jaxpipe"], 1) as group:
            group.ask("export", path=str(values), config=single)
        build = {"config": single, "values": str(values)}
        entries.append(BenchEntry("torch single", "torch single", {"schedule": None, **build}))
        for peer in dict.fromkeys(VARIANTS[name].peer for name in self.arguments.schedules):
            entries.append(BenchEntry(f"torch {peer}", "torch", {"schedule": peer, **build}))
        return entries

    def _predicted(
        self,
        entries: Sequence[BenchEntry],
        results: Mapping[str, Any],
        microbatches: int,
        costs: Path,
    ) -> dict[str, float]:
        """Return the simulator's seconds of a step of every schedule, with the update.

        It is given ops timed just before and just after the step, since the machine's speed varies.
        """
        seconds = {}
        for before, entry in pairwise(entries):
            name = entry.name.removeprefix("jaxpipe ")
            around = [
                results[_steps_after(each)]
                for each in (before, entry)
                if _steps_after(each) in results
            ]
            if name in self.arguments.schedules and len(around) == 2:
                ops, update = _without_update(_mean(around))
                config = VARIANTS[name].config(self.config, microbatches, costs)
                seconds[name] = update + predict_seconds(config, ops)
        return seconds

    def _op_seconds(self, groups: Mapping[str, ProcessGroup]) -> dict[str, Any]:
        """Return the seconds of ops, averaged over the ranks, which run them at the same time."""
        config = VARIANTS["1f1b"].config(self.config, self.arguments.microbatches[0])
        return _mean(_wake_group(groups, "jaxpipe").ask("ops", config=_builtins(config)))

    def _measure_memory(self, steps: Sequence[StepMeasurements]) -> None:
        """Measure the memory of every step, in fresh processes."""
        for one in steps:
            if one.microbatches not in self.arguments.memory:
                continue
            for entry in self._entries(one.microbatches, self.directory / "costs.json"):
                program = self.programs[entry.group.split()[0]]
                size = 1 if entry.group.endswith("single") else PP
                with ProcessGroup(entry.name, program, size, measures_memory=True) as group:
                    group.ask("build", name=entry.name, **entry.build)
                    answers = group.ask("peak", name=entry.name)
                most = max(answers, key=lambda answer: answer["peak"])
                one.memory[entry.name] = PeakMemory(most["peak"], most["before"])


def _steps_after(entry: BenchEntry) -> str:
    return f"{_OPS}{entry.name}"


def _turn(groups: Mapping[str, ProcessGroup], entry: BenchEntry) -> Callable[[], StepTiming]:
    def turn() -> StepTiming:
        group = _wake_group(groups, entry.group)
        before = group.cpu_seconds()
        seconds = step_seconds(group.ask("step", name=entry.name))
        return StepTiming(seconds, group.cpu_seconds() - before)

    return turn


def _wake_group(groups: Mapping[str, ProcessGroup], which: str) -> ProcessGroup:
    """Return a group after all others returned their freed memory, so that all fit in memory."""
    for name, group in groups.items():
        if name != which:
            group.rest()
    return groups[which]


def _check_losses(name: str, losses: Sequence[float], single: Sequence[float]) -> None:
    for loss, wanted in zip(losses, single):
        if not abs(loss - wanted) < _AGREE * wanted:
            raise BenchError(f"{name}: its losses {losses} are not those of one device, {single}.")


def _mean(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def mean(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return _mean(values)
        if isinstance(values[0], list | tuple):  # shares of layers, which are not measured
            return values[0]
        return sum(values) / len(values)

    return {name: mean([answer[name] for answer in answers]) for name in answers[0]}


def _builtins(config: Config) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def _without_update(ops: dict[str, Any]) -> tuple[OpSeconds, float]:
    """Return the seconds of ops, and those of a rank's update."""
    rest = {name: value for name, value in ops.items() if name != "update"}
    return msgspec.convert(rest, OpSeconds), ops["update"]


def _check(arguments: argparse.Namespace, config: Config) -> None:
    """Raise `ConfigError` if the options, the machine or a configuration are unsuitable."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < PP:
        raise ConfigError(f"this needs Linux and {PP} processor cores.")
    check_positive(rounds=arguments.rounds)
    if arguments.torch and not shutil.which(arguments.torch):
        raise ConfigError(f"--torch {arguments.torch} cannot be started: give a Python with torch.")
    check_out(arguments.out)
    for name in arguments.schedules:
        if name not in VARIANTS:
            raise ConfigError(f"unknown schedule {name!r}: choose of {', '.join(VARIANTS)}.")
        for microbatches in arguments.microbatches:
            if microbatches % PP:
                raise ConfigError(f"--microbatches {microbatches} must be even, for two replicas.")
            variant = VARIANTS[name].config(config, microbatches)
            check_settings(variant)
            resolve(variant, CPUS)
