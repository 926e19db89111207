"""`bench correct`: relative errors of F, B and W in bfloat16 and in fp8 against float32.

Compares the executor's step, with separate B and W, with the reference implementation on one device
in float32 at the highest matmul precision, from the same parameters and tokens. An error is the
norm of the difference over the norm of the float32 gradient: `F` is measured on the gradient of the
head, which depends on the output of F; `B` on that of the embedding, which depends on the output of
B; `W` on the layer parameter with the largest error. The exit code is 1 if an error is above its
limit, which for fp8 is a multiple of the error of the reference implementation with operands
rounded to 8 bits: it grows with the width of the model.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from jaxpipe.config import Config, ParallelConfig
from jaxpipe.core.executor import losses_and_gradients_ref
from jaxpipe.lab.bench import options
from jaxpipe.lab.bench.processes import BenchError
from jaxpipe.runtime.devices import DEVICES, data_sheet_of
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.trainer import Trainer

Tree = Any
LIMIT = 0.05  # of bfloat16; a wrong sum has an error above 0.5
FP8_LIMIT = 1.5  # of fp8, over the error that the rounding of operands alone causes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_config(parser, "configs/llama3_8b_layers_1gpu.toml")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    options.add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file; raises `BenchError` above a limit."""
    config = options.load_for_devices(arguments)
    result = options.provenance(arguments) | measure(config, arguments.layers)
    rows = [
        [name, *(f"{errors[op]:.2g} (at most {result['limits'][name][op]:.2g})" for op in "FBW")]
        for name, errors in result["errors"].items()
    ]
    print(options.markdown_table(("products in", "F", "B", "W"), rows))
    options.write_json(result, arguments.out)
    for name, errors in result["errors"].items():
        for op, limit in result["limits"][name].items():
            if not errors[op] <= limit:
                raise BenchError(f"in {name} {op} is off by {errors[op]:.3g}, above {limit:.3g}.")


def measure(config: Config, layers: int) -> dict[str, Any]:
    """Return the errors of F, B and W in each precision that the device supports.

    Args:
        config: of the model; it runs on one device.
        layers: of the model.

    Returns:
        device, and `errors` and `limits` by precision and op.
    """
    device = jax.devices()[0]
    config = replace(
        config,
        model=replace(config.model, n_layers=layers),
        parallel=ParallelConfig(schedule="zb_h1", layer_split="even"),
        train=replace(config.train, grad_accum_steps=1, remat="none"),
    )
    sheet = data_sheet_of(device.device_kind)
    has_fp8 = sheet is not None and DEVICES[sheet].fp8
    want = _gradients_ref(config, "none")
    errors = {"bfloat16": _errors(_gradients(config, "none"), want)}
    limits = {"bfloat16": dict.fromkeys("FBW", LIMIT)}
    if device.platform == "cpu" or has_fp8:
        errors["fp8"] = _errors(_gradients(config, "current"), want)
        rounding = _errors(_gradients_ref(config, "current"), want)
        limits["fp8"] = {op: FP8_LIMIT * error for op, error in rounding.items()}
    return {"device": device.device_kind, "errors": errors, "limits": limits}


def _gradients_ref(config: Config, fp8: str) -> Tree:
    """Return all gradients of the reference implementation in float32, on the host."""
    model = replace(config.model, attention="xla")
    trainer, params, batch = _start(replace(config, model=model), "float32", fp8)
    layers = trainer.layout.unstack(params["layers"])
    reference = partial(losses_and_gradients_ref, trainer.pipeline.functions)
    step = jax.jit(reference, compiler_options=trainer.compiler_options)
    with jax.default_matmul_precision("highest"):
        return jax.device_get(step(params["embed_head"], layers, batch)[1])


def _gradients(config: Config, fp8: str) -> Tree:
    """Return all gradients of the executor in bfloat16, with products in `fp8`, on the host."""
    trainer, params, batch = _start(config, "bfloat16", fp8)
    variables = jax.tree.map(jnp.asarray, trainer.model.functions.variables)
    step = jax.jit(trainer.pipeline.step, compiler_options=trainer.compiler_options)
    _, gradients, *_ = step(params, batch, variables)
    return jax.device_get(gradients | {"layers": trainer.layout.unstack(gradients["layers"])})


def _start(config: Config, dtype: str, fp8: str) -> tuple[Trainer, Tree, Tree]:
    train = replace(config.train, compute_dtype=dtype, fp8=fp8)
    trainer = Trainer.resolve(replace(config, train=train), jax.devices()[:1])
    return trainer, trainer.init_parameters(), trainer.put(random_batch(trainer.config))


def _errors(got: Tree, want: Tree) -> dict[str, float]:
    """Return the error of each op, from the gradients that depend on it."""
    norm = np.linalg.norm
    off = jax.tree.map(lambda got, want: float(norm(got - want) / norm(want)), got, want)
    return {
        "F": _worst(off["embed_head"]["head"]),
        "B": _worst(off["embed_head"]["embed"]),
        "W": _worst(off["layers"]),
    }


def _worst(errors: Tree) -> float:
    """Return the largest error, or NaN if any is NaN (Python's `max` would depend on the order)."""
    return float(np.max(jax.tree.leaves(errors)))
