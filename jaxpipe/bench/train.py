"""`bench train`: training steps of a configuration on the present devices, on random tokens.

Prints and writes the seconds of a step (median, least and most), tokens/s, MFU by the matrix
products that training needs (recomputation not counted), the compiler's seconds and, where the
device says, its peak memory.
"""

import argparse
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.analysis import flops_per_token
from jaxpipe.checks import validate
from jaxpipe.config import Config, ConfigError
from jaxpipe.runtime import use_cpu_devices, use_gpu_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("config", help="a TOML file, such as configs/llama3_8b_layers_1gpu.toml")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--steps", type=int, default=10, help="steps that are measured, after two others (10)")
    add("--out", type=Path, metavar="FILE.json", help="where to write them")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    config = configs.load(arguments.config, arguments.overrides)
    validate(config)
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} must be at least 1.")
    if arguments.out and not arguments.out.parent.is_dir():
        raise ConfigError(f"--out {arguments.out} cannot be written: its folder is missing.")
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    use_gpu_memory()
    found = measure(config, arguments.steps)
    words = ["python -m jaxpipe.bench train", arguments.config, *arguments.overrides]
    found["command"] = " ".join([*words, "--steps", str(arguments.steps)])
    table = Table("figure", "value")
    for name, value in found.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        table.add_row(name, f"{shown:,.4g}" if isinstance(shown, float) else str(shown))
    Console(highlight=False).print(table)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def measure(config: Config, steps: int) -> dict[str, Any]:
    """The figures of so many steps."""
    import jax

    from jaxpipe.bench.processes import seconds_of
    from jaxpipe.bench.worker import Worker
    from jaxpipe.metrics import memory_peak, peak_flops

    parallel, train = config.parallel, config.train
    devices = parallel.pp * parallel.dp * parallel.tp
    validate(config, devices=min(devices, jax.device_count()))
    worker = Worker()
    built = worker.build("step", "trained", msgspec.to_builtins(config))
    seconds = [seconds_of([worker.step("step")]) for _ in range(steps)]
    samples = train.grad_accum_steps * train.microbatch_size * parallel.dp
    rate = samples * train.seq_len / median(seconds) / devices
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind)
    return {
        "date": date.today().isoformat(),
        "device": kind,
        "devices": devices,
        "versions": {"Python": sys.version.split()[0], "jax": jax.__version__},
        "parameters": config.model.parameter_count(),
        "step_seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "tokens_per_second_per_device": rate,
        "mfu": peak and rate * flops_per_token(config.model, train.seq_len) / peak,
        "peak_memory_bytes": memory_peak(),
        "compile_seconds": built["compile"],
        "losses": built["losses"],
    }
