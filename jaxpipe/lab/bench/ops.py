"""`bench ops`: seconds of every op of a configuration on the present devices, each in a loop.

F, B, W and BW are those of one layer and one microbatch or sequence slice, in the compute dtype and
with the remat of `[train]`; `head` is the loss with its gradients. They run with their collectives
on all devices that share a sequence (`parallel.tp` x `parallel.cp`); with fewer devices than tp,
on one device at the sizes of a tp shard and without collectives. Each op is printed with the FLOPs
of its matrix products as the planner counts them, their rate, and that rate as a share of the
device's peak. `plan --costs` and `parallel.costs` read the file.

With `--table` and without a configuration it measures the device itself: matrix products by dtype
and sizes, attention by length and head size, copies, launches and the rate under load. `plan
--machine FILE.json` reads that file, for any configuration.
"""

import argparse
import os
from statistics import median
from typing import Any

import jax
from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError, ParallelConfig
from jaxpipe.lab.bench import card, options
from jaxpipe.lab.bench.processes import processor_name
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import measured_for
from jaxpipe.run.measure.op_timers import op_seconds
from jaxpipe.run.measure.step_timers import TransferTimer, UpdateTimer
from jaxpipe.runtime.devices import peak_flops
from jaxpipe.training.trainer import Trainer

_COLUMNS = ("op", "ms", "GFLOP", "TFLOP/s", "of the peak")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    options.add_config(parser, "configs/llama3_8b_pp4.toml", needed=False)
    add("--layers", type=int, default=2, help="layers in an iteration of a loop (2)")
    add("--repeats", type=int, default=5, help="loops, of which the median counts (5)")
    add("--link", type=float, default=50e9, help="bytes/s to a neighbour, if there is none (50e9)")
    card.add_arguments(parser)
    options.add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    options.check_positive(layers=arguments.layers, repeats=arguments.repeats)
    if "config" not in arguments and arguments.overrides:  # options came first (`parse_commands`)
        arguments.config, *arguments.overrides = arguments.overrides
    if arguments.table:
        return card.run(arguments)
    if "config" not in arguments:
        raise ConfigError("give a configuration, or --table to measure the card.")
    config = options.load_for_devices(arguments)
    result = options.provenance(arguments) | measure(
        config, arguments.layers, arguments.repeats, arguments.link
    )
    print(f"{result['device']}\n\n{options.markdown_table(_COLUMNS, rows(result))}")
    options.write_json(result, arguments.out)


def measure(config: Config, layers: int, repeats: int, link: float) -> dict[str, Any]:
    """Time every op.

    Args:
        config: of the model and the mesh.
        layers: applied in one iteration of a timing loop.
        repeats: loops, whose median is returned.
        link: bytes/s between pipeline ranks, used if there are too few devices to measure it.

    Returns:
        the settings that were measured, device, its peak FLOP/s, seconds by op, seconds of the
        update of a layer, FLOPs by op, and whether the transfer was measured.
    """
    devices = tuple(jax.devices())
    one_rank = reduce_to_one_rank(config, len(devices))
    sharing = one_rank.parallel.dp * one_rank.parallel.tp
    trainer = Trainer.resolve(one_rank, devices[:sharing])
    seconds = op_seconds(trainer, layers=layers, repeats=repeats)
    costs = costs_of(one_rank)
    seconds["transfer"] = costs.message / link
    has_neighbour = len(devices) >= 2 * sharing
    if has_neighbour:
        parallel = replace(one_rank.parallel, pp=2, allow_underfilled=True)
        two_ranks = replace(one_rank, parallel=parallel)
        transfer = TransferTimer(Trainer.resolve(two_ranks, devices[: 2 * sharing]))
        seconds["transfer"] = median(transfer.seconds() for _ in range(repeats))
    update = UpdateTimer(Trainer.resolve(reduce_to_one_device(config), devices[:1]), layers)
    of_layers = update.share_of_layers * median(update.seconds() for _ in range(repeats))
    layer = costs.kinds[costs.order[0]]
    return {
        "of": measured_for(config),
        "device": _device_name(devices[0]),
        "peak": peak_flops(devices[0].device_kind),
        "seconds": seconds,
        "update": of_layers / update.layers,
        "flops": {
            "F": layer.F, "B": layer.B, "W": layer.W, "BW": layer.B + layer.W,
            "head": costs.head.flops(),
        },
        "transfer_measured": has_neighbour,
    }  # fmt: skip


def reduce_to_one_rank(config: Config, devices: int) -> Config:
    """Return the configuration for one pipeline rank: the devices that share a sequence.

    With fewer devices than `parallel.tp` it is that of one device (`reduce_to_one_device`).

    Raises:
        ConfigError: there are too few devices for `parallel.cp`.
    """
    full = config.parallel
    if full.tp * full.cp > devices:
        if full.cp > 1:
            raise ConfigError(
                f"parallel.tp={full.tp} x parallel.cp={full.cp} devices share a sequence, but "
                f"there are {devices}: time ops on as many, or with parallel.cp=1."
            )
        config = reduce_to_one_device(config)
    parallel = ParallelConfig(
        dp=full.cp, cp=full.cp, cp_method=full.cp_method, cp_heads=full.cp_heads,
        tp=config.parallel.tp, slices=full.slices,
        sequence_parallel=full.sequence_parallel and config.parallel.tp > 1, schedule="1f1b",
    )  # fmt: skip
    return replace(config, parallel=parallel, train=replace(config.train, grad_accum_steps=1))


def reduce_to_one_device(config: Config) -> Config:
    """Return the configuration of a tp shard of the model, on a mesh of one device."""
    model = config.model.part(config.parallel.tp)
    train = replace(config.train, grad_accum_steps=1)
    return replace(config, model=model, parallel=ParallelConfig(schedule="1f1b"), train=train)


def _device_name(device: jax.Device) -> str:
    """Return the device's name; for a CPU, its model and the number of usable cores."""
    if device.platform != "cpu":
        return device.device_kind
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {cores} core{'s' * (cores > 1)}"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows: every op, and the transfer if it was measured."""
    seconds = result["seconds"]
    measured = seconds["layer"] | seconds | {"update, a layer": result["update"]}
    del measured["layer"]
    if not result["transfer_measured"]:
        del measured["transfer"]
    cells = []
    for name, each in measured.items():
        rate = result["flops"].get(name, 0) / each
        share = f"{rate / result['peak']:.1%}" if rate and result["peak"] else ""
        work = [f"{rate * each / 1e9:,.1f}", f"{rate / 1e12:,.3f}"] if rate else ["", ""]
        cells.append([name, f"{each * 1e3:,.3f}", *work, share])
    return cells
