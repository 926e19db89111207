"""`bench context`: steps of sequences that two replicas share, beside the step of one device.

One process of one thread, and two, each pinned to a core, train the same sequences as any run does.
All take turns in rounds; a method's share is the median over rounds of its step over that of the
one device, in the same round: 0.5 were half, at no cost.
"""

import argparse
import sys
from contextlib import ExitStack
from statistics import median
from typing import Any, get_args

import msgspec

from jaxpipe import config as configs
from jaxpipe.bench.options import add_config, add_out, at_least_one, check_out, markdown, write
from jaxpipe.bench.processes import BenchError, Group, loss_of, processor, seconds_of
from jaxpipe.bench.variants import single_config
from jaxpipe.config import Config
from jaxpipe.partition.sequence import Method
from jaxpipe.planning.checks import filled, validate

_WORKER = (sys.executable, "-m", "jaxpipe.bench.worker")
_ALONE = "one device"
_SHARE = 2  # devices
_AGREE = 1e-5  # losses, relative


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_config(parser, "configs/bench_s.toml")
    methods = get_args(Method)
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    parser.add_argument("--rounds", type=int, default=5, help="how often every step is made (5)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    at_least_one(rounds=arguments.rounds)
    check_out(arguments.out)
    config = filled(configs.load(arguments.config, arguments.overrides), None)
    alone = single_config(config, config.train.grad_accum_steps)
    entries = {_ALONE: alone} | {method: shared(alone, method) for method in arguments.methods}
    for entry in entries.values():
        validate(entry, devices=entry.parallel.dp, platform="cpu")
    seconds = _measured(entries, arguments.rounds)
    shares = {name: [a / b for a, b in zip(of, seconds[_ALONE])] for name, of in seconds.items()}
    rows = [
        [name, f"{median(of):.3f}", f"{median(shares[name]):.3f}",
         f"{min(shares[name]):.3f} to {max(shares[name]):.3f}"]
        for name, of in seconds.items()
    ]  # fmt: skip
    print(markdown(["step", "seconds", "of one device's", "rounds"], rows))
    write({"processor": processor(), "seconds": seconds}, arguments.out)


def shared(config: Config, method: Method) -> Config:
    """A configuration of one device on two that share its sequences by this method."""
    parallel = msgspec.structs.replace(
        config.parallel, dp=_SHARE, cp=_SHARE, cp_method=method, zero_stage=0
    )
    return msgspec.structs.replace(config, parallel=parallel)


def _measured(entries: dict[str, Config], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, round by round. Raises `BenchError` where losses differ."""
    with ExitStack() as stack:
        sizes = {_ALONE: 1, "sharing": _SHARE}
        groups = {
            name: stack.enter_context(Group(name, _WORKER, size)) for name, size in sizes.items()
        }
        group_of = {name: groups.get(name, groups["sharing"]) for name in entries}
        built = {
            name: group_of[name].ask("build", name=name, kind="trained", config=_plain(entry))
            for name, entry in entries.items()
        }
        _check({name: loss_of(answers, "losses") for name, answers in built.items()})
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        for _ in range(rounds):
            for name in entries:
                seconds[name].append(seconds_of(group_of[name].ask("step", name=name)))
    return seconds


def _plain(config: Config) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def _check(losses: dict[str, list[float]]) -> None:
    for name, found in losses.items():
        for loss, wanted in zip(found, losses[_ALONE]):
            if not abs(loss / wanted - 1) < _AGREE:
                raise BenchError(f"{name} has losses {found}, {_ALONE} {losses[_ALONE]}.")
