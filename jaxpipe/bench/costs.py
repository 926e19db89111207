"""`bench ops`: seconds of every op of a configuration on the present device, each alone in a loop.

F, B, W and BW are of one layer and one microbatch, in the compute dtype and with the remat of
`[train]`; `head` is the loss with its gradients. Beside each stand its matrix products' FLOPs by
the planner's account, the rate they ran at, and that rate as a share of the device's peak. With
`parallel.tp` the sizes are those of one device; its collectives are not in the times. The file
is what `plan --costs` and `parallel.costs` read.
"""

import argparse
import os
import sys
from datetime import date
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.bench.options import add_config, add_out, at_least_one, load_for_devices, write
from jaxpipe.bench.processes import processor
from jaxpipe.config import Config, ConfigError
from jaxpipe.planning.costs import costs_of

if TYPE_CHECKING:
    import jax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add_config(parser, "configs/llama3_8b_pp4.toml")
    add("--layers", type=int, default=2, help="layers in a loop's turn (2)")
    add("--repeats", type=int, default=5, help="loops, of which the median counts (5)")
    add("--link", type=float, default=50e9, help="bytes/s to a neighbour, if there is none (50e9)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    at_least_one(layers=arguments.layers, repeats=arguments.repeats)
    config = load_for_devices(arguments)
    found = measure(config, arguments.layers, arguments.repeats, arguments.link)
    words = ["python -m jaxpipe.bench ops", arguments.config, *arguments.overrides]
    how = ["--layers", str(arguments.layers), "--repeats", str(arguments.repeats)]
    found["command"] = " ".join([*words, *how])
    _print(found)
    write(found, arguments.out)


def measure(config: Config, layers: int, repeats: int, link: float) -> dict[str, Any]:
    """Seconds and FLOPs by op, with the device and versions."""
    if config.parallel.slices > 1:
        raise ConfigError(
            f"parallel.slices={config.parallel.slices}: ops are timed on whole sequences; time "
            f"them with parallel.slices=1."
        )
    if config.parallel.sdp > 1:
        raise ConfigError(
            f"parallel.sdp={config.parallel.sdp}: ops are timed on one device, which cannot gather "
            f"the keys of shared sequences; time them with parallel.sdp=1."
        )
    import jax

    from jaxpipe.bench.ops import OpTimer, TransferTimer, UpdateTimer
    from jaxpipe.runtime.devices import peak_flops
    from jaxpipe.training.trainer import Trainer

    device = jax.devices()[0]
    part = of_one_device(config)
    one = Trainer(part, (device,))
    turns = 2 if device.platform == "cpu" else 8
    ops = OpTimer.of(one, layers=layers, turns=turns)
    rounds = [ops.seconds() for _ in range(repeats)]
    seconds = {name: median(each[name] for each in rounds) for name in rounds[0] if name != "layer"}
    seconds["layer"] = {
        name: median(each["layer"][name] for each in rounds) for name in rounds[0]["layer"]
    }
    costs = costs_of(part)
    if len(jax.devices()) > 1:
        parallel = msgspec.structs.replace(part.parallel, pp=2)
        pair = Trainer(msgspec.structs.replace(part, parallel=parallel), tuple(jax.devices()[:2]))
        transfer = TransferTimer(pair)
        seconds["transfer"] = median(transfer.seconds() for _ in range(repeats))
    else:
        seconds["transfer"] = costs.message / link
    update = UpdateTimer(one, layers)
    layer = costs.kinds[costs.order[0]]
    return {
        "date": date.today().isoformat(),
        "device": _named(device),
        "peak": peak_flops(device.device_kind),
        "versions": {"Python": sys.version.split()[0], "jax": jax.__version__},
        "seconds": seconds,
        "update": median(update.seconds() for _ in range(repeats)) / layers,
        "flops": {
            "F": layer.F, "B": layer.B, "W": layer.W, "BW": layer.B + layer.W,
            "head": costs.head,
        },
        "transfer_measured": len(jax.devices()) > 1,
    }  # fmt: skip


def of_one_device(config: Config) -> Config:
    """The model that one device of the tp group computes, on a mesh of one device."""
    model = config.model.part(config.parallel.tp)
    parallel = configs.ParallelConfig(schedule="1f1b")
    train = msgspec.structs.replace(config.train, grad_accum_steps=1)
    return msgspec.structs.replace(config, model=model, parallel=parallel, train=train)


def _named(device: "jax.Device") -> str:
    """The device; of processors which, and how many cores may be used."""
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} core{'s' * (cores > 1)}"


COLUMNS = ("op", "ms", "GFLOP", "TFLOP/s", "of the peak")


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The cells of every op that was measured."""
    seconds, peak = found["seconds"], found["peak"]
    every = {**seconds["layer"], **{k: v for k, v in seconds.items() if k != "layer"}}
    if not found["transfer_measured"]:
        del every["transfer"]
    cells = []
    for name, each in {**every, "update, a layer": found["update"]}.items():
        flops = found["flops"].get(name)
        rate = ["", "", ""]
        if flops:
            share = f"{flops / each / peak:.1%}" if peak else ""
            rate = [f"{flops / 1e9:,.1f}", f"{flops / each / 1e12:,.3f}", share]
        cells.append([name, f"{each * 1e3:,.3f}", *rate])
    return cells


def _print(found: dict[str, Any]) -> None:
    title = f"{found['device']}, {', '.join(' '.join(v) for v in found['versions'].items())}"
    table = Table(*COLUMNS, title=title)
    for cells in rows(found):
        table.add_row(*cells)
    Console(highlight=False).print(table)
    if not found["transfer_measured"]:
        print("transfer: from --link, there is one device")
