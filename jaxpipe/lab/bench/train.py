"""`bench train`: training steps of a configuration on the present devices, on random tokens.

Prints and writes the seconds of a step (median, minimum and maximum), tokens/s, MFU from the FLOPs
of matrix products without recomputation, seconds of the compiler and, where the device reports it,
peak memory.
"""

import argparse
from statistics import median
from typing import Any

import jax
import msgspec

from jaxpipe.config import Config
from jaxpipe.lab.bench import options
from jaxpipe.lab.bench.worker import BenchWorker
from jaxpipe.runtime.devices import memory_peak, peak_flops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_config(parser, "configs/llama3_8b_layers_1gpu.toml")
    parser.add_argument("--steps", type=int, default=10, help="measured, after two others (10)")
    options.add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file."""
    options.check_positive(steps=arguments.steps)
    config = options.load_for_devices(arguments)
    result = options.provenance(arguments) | measure(config, arguments.steps)
    shown = [(n, f"{v:,.4g}" if isinstance(v, float) else str(v)) for n, v in result.items()]
    print(options.markdown_table(("figure", "value"), shown))
    options.write_json(result, arguments.out)


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Train `steps` steps after two of warm-up; return the figures that are printed, by name."""
    train, devices = config.train, config.parallel.devices
    worker = BenchWorker()
    built = worker.build("step", "trained", msgspec.to_builtins(config))
    timed = [worker.step("step") for _ in range(steps)]
    seconds = [one["end"] - one["begin"] for one in timed]
    rate = config.tokens_per_step / median(seconds) / devices
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind)
    flops = rate * config.model.flops_per_token(train.seq_len)
    flops -= rate * config.model.frozen_flops(config.lora.rank)
    return {
        "device": kind,
        "devices": devices,
        "parameters": config.model.parameter_count(),
        "precision": train.compute_dtype if train.fp8 == "none" else "fp8",
        "remat": train.remat,
        "step_seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "tokens_per_second_per_device": rate,
        "flops_per_second_per_device": flops,
        "mfu": peak and flops / peak,
        "peak_memory_bytes": memory_peak(),
        "compile_seconds": built["compile"],
        "losses": built["losses"],
    }
