"""`bench step`: training steps of every schedule, against predictions, one device and PyTorch.

Two processes of one thread, each pinned to its own core, run full training steps: forward, backward
and AdamW. Every schedule is compared with the simulator's step time, from ops timed just before and
after the step with both cores busy; with one device, which sums gradients over a scan; with data
parallelism on the same two cores; and with PyTorch's schedule of the same family, which starts from
the same values and tokens and must reach the same losses.

  efficiency = (single-device step / 2) / step, within a round; then the median over rounds.

  bubble = share of both cores' time during a step in which the ranks used no CPU.

All steps take turns in rounds. A step is repeated if other processes used over 6 % of a core in it.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.lab.bench import options, variants
from jaxpipe.lab.bench.processes import (
    BenchError,
    ProcessGroup,
    list_programs,
    processor_name,
    run_undisturbed,
)
from jaxpipe.lab.bench.results import MeasuredStep, table
from jaxpipe.lab.bench.variants import PP, data_parallel_config, schedule_config, single_config
from jaxpipe.planning import OpSeconds, resolve
from jaxpipe.planning.rules.across import check_settings

_AGREE = 1e-4  # losses of both frameworks, relative


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    options.add_config(parser, "configs/bench_s.toml")
    add("--schedules", nargs="+", default=list(variants.DEFAULT), metavar="NAME",
        help="such as zb_h1 or interleaved_1f1b:v=2,in_flight=5")  # fmt: skip
    add("--microbatches", nargs="+", type=int, default=[8, 16], metavar="M", help="of a step")
    add("--rounds", type=int, default=3, help="number of times every step is run (3)")
    add("--patience", type=float, default=30, help="longest wait for a quiet machine, seconds (30)")
    options.add_torch(parser)
    options.add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file, which is complete after each `--microbatches`.

    The file has the steps, and every measurement of the ops.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = configs.load(arguments.config, arguments.overrides)
    _check(arguments, config)
    tokens = config.train.microbatch_size * config.train.seq_len
    machine = f"{PP} cores of {processor_name()}, one thread a rank"
    result = options.provenance(arguments) | {"machine": machine, "tokens": tokens}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bench = _Bench(arguments, config, Path(directory), stack)
        result["versions"] |= {"torch": bench.groups["torch"].version} if arguments.torch else {}
        for microbatches in arguments.microbatches:
            bench.measure(microbatches)
            options.write_json(result | {"ops": bench.ops, "steps": bench.steps}, arguments.out)
    print(table(bench.steps, tokens))


class _Bench:
    """One run of the command.

    Args:
        arguments: of the command.
        config: of the run.
        directory: for files that the processes exchange.
        stack: ends the processes.
    """

    def __init__(
        self, arguments: argparse.Namespace, config: Config, directory: Path, stack: ExitStack
    ):
        self.arguments, self.config, self.directory = arguments, config, directory
        self.ops: list[dict[str, Any]] = []
        self.steps: list[MeasuredStep] = []
        programs = list_programs(arguments.torch)
        self.groups = {
            name: stack.enter_context(ProcessGroup(name, program, size))
            for framework, program in programs.items()
            for name, size in ((f"{framework} single", 1), (framework, PP))
        }
        self.undisturbed = partial(
            run_undisturbed, self.groups.values(), patience=arguments.patience
        )

    def measure(self, microbatches: int) -> None:
        """Build every step, check its losses, then measure all steps in rounds."""
        seconds, _ = _without_update(self._time_ops())
        costs = self.directory / "costs.json"
        costs.write_bytes(msgspec.json.encode({"seconds": seconds}))
        steps = []
        for step, build in self._builds(microbatches, costs):
            answers = self._group(step).ask("build", name=step.label, **build)
            step.losses = max(answer["losses"] for answer in answers)  # 0 on ranks without a head
            step.compile = max((a["compile"] for a in answers if "compile" in a), default=None)
            steps.append(step)
            _check_losses(step.label, step.losses, steps[0].losses)
        self.steps += steps
        for number in range(self.arguments.rounds):
            self._round(number, steps, costs)
            print(f"round {number + 1} of M={microbatches} done", file=sys.stderr, flush=True)
        for step in steps:
            self._group(step).ask("drop", name=step.label)

    def _round(self, number: int, steps: Sequence[MeasuredStep], costs: Path) -> None:
        """Run all steps once; the ops before and after a step predict its seconds."""
        before = None
        for step in steps:
            timing = self.undisturbed(step.label, partial(self._run, step))
            if timing:
                step.seconds[number], step.busy[number] = timing
            if step.framework == "torch" or step.name == "single":
                continue
            after = self.undisturbed(f"ops after {step.label}", self._time_ops)
            self.ops += [after] if after else []
            if before and after and step.name != "data parallel":
                config = schedule_config(self.config, step.name, step.microbatches, costs)
                step.predicted[number] = predict(config, before, after)
            before = after

    def _run(self, step: MeasuredStep) -> tuple[float, float]:
        """Return the seconds of a step, and the CPU seconds of its processes together."""
        group = self._group(step)
        before = group.cpu_seconds()
        return group.step_seconds(step.label), group.cpu_seconds() - before

    def _builds(
        self, microbatches: int, costs: Path
    ) -> Iterator[tuple[MeasuredStep, dict[str, Any]]]:
        """Yield all steps with what `build` needs; all losses must equal those of the first."""
        to_plain, names = msgspec.to_builtins, self.arguments.schedules
        single = to_plain(single_config(self.config, microbatches))
        double = to_plain(data_parallel_config(self.config, microbatches))

        def step(framework: str, name: str, **build: Any) -> tuple[MeasuredStep, dict[str, Any]]:
            return MeasuredStep(framework, name, microbatches), build

        yield step("jaxpipe", "single", kind="accumulated", config=single)
        yield step("jaxpipe", "data parallel", kind="trained", config=double)
        for name in names:
            config = to_plain(schedule_config(self.config, name, microbatches, costs))
            yield step("jaxpipe", name, kind="trained", config=config)
        if self.arguments.torch:
            values = str(self.directory / f"values-{microbatches}.npz")
            self.groups["jaxpipe single"].ask("export", path=values, config=single)
            yield step("torch", "single", schedule=None, config=single, values=values)
            for peer in dict.fromkeys(filter(None, map(variants.peer_of, names))):
                yield step("torch", peer, schedule=peer, config=single, values=values)

    def _time_ops(self) -> dict[str, Any]:
        """Return the seconds of ops, averaged over the ranks, which run them at the same time."""
        config = schedule_config(self.config, "1f1b", self.arguments.microbatches[0])
        return _mean(*self.groups["jaxpipe"].ask("ops", config=msgspec.to_builtins(config)))

    def _group(self, step: MeasuredStep) -> ProcessGroup:
        return self.groups[step.label if step.name == "single" else step.framework]


def predict(config: Config, *ops: dict[str, Any]) -> float:
    """Return the simulator's seconds of a step with its update, from the mean of timed ops."""
    seconds, update = _without_update(_mean(*ops))
    return update + variants.predict_seconds(config, seconds)


def _mean(*answers: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda *values: sum(values) / len(values), *answers)


def _without_update(ops: dict[str, Any]) -> tuple[OpSeconds, float]:
    """Return the seconds of ops, and those of a rank's update."""
    seconds = {name: value for name, value in ops.items() if name != "update"}
    return msgspec.convert(seconds, OpSeconds), ops["update"]


def _check_losses(name: str, losses: Sequence[float], single: Sequence[float]) -> None:
    for loss, wanted in zip(losses, single):
        if not abs(loss - wanted) < _AGREE * wanted:
            raise BenchError(f"{name}: its losses {losses} are not those of one device, {single}.")


def _check(arguments: argparse.Namespace, config: Config) -> None:
    """Raise `ConfigError` if the options, the machine or a configuration are unsuitable."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < PP:
        raise ConfigError(f"this needs Linux and {PP} processor cores.")
    options.check_positive(rounds=arguments.rounds)
    options.check_torch(arguments.torch)
    options.check_out(arguments.out)
    peers = filter(None, map(variants.peer_of, arguments.schedules)) if arguments.torch else ()
    stages, layers = max([PP, *map(variants.peer_stages, peers)]), config.model.n_layers
    if layers % stages:
        raise ConfigError(
            f"model.n_layers={layers} must be a multiple of the {stages} stages, which have the "
            f"same number of layers in this comparison: change it."
        )
    for microbatches in arguments.microbatches:
        if microbatches % PP:
            raise ConfigError(f"--microbatches {microbatches} must be even, for two replicas.")
        for name in arguments.schedules:
            variant = schedule_config(config, name, microbatches)
            check_settings(variant)
            resolve(variant, variants.CPUS)
