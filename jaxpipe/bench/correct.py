"""`bench correct`: relative errors of F, B and W in bfloat16 and in fp8 against float32.

Compares the executor's step, with separate B and W, with the reference implementation on one device
in float32 at the highest matmul precision, from the same parameters and tokens. An error is the
norm of the difference over the norm of the float32 gradient: `F` is measured on the gradient of the
head, which depends on the output of F; `B` on that of the embedding, which depends on the output of
B; `W` on the layer parameter with the largest error. The exit code is 1 if an error is above its
limit.
"""

import argparse
from functools import partial
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpipe.bench.options import add_config, add_out, load_for_devices, provenance, write_json
from jaxpipe.bench.processes import BenchError
from jaxpipe.config import Config
from jaxpipe.config import ParallelConfig as Parallel
from jaxpipe.runtime.devices import DEVICES

Tree = Any
LIMITS = {"bfloat16": 0.05, "fp8": 0.25}  # a wrong sum has an error above 0.5
_WAYS = {"bfloat16": "none", "fp8": "current"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_config(parser, "configs/llama3_8b_layers_1gpu.toml")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table and write the file; raises `BenchError` above a limit."""
    config = load_for_devices(arguments)
    result = provenance(arguments) | measure(config, arguments.layers)
    table = Table("products in", "F", "B", "W", "limit", title=result["device"])
    for name, errors in result["errors"].items():
        table.add_row(name, *(f"{errors[op]:.2g}" for op in "FBW"), f"{LIMITS[name]:g}")
    Console(highlight=False).print(table)
    write_json(result, arguments.out)
    for name, errors in result["errors"].items():
        if not _worst(errors) <= LIMITS[name]:
            raise BenchError(f"in {name} an op is off by more than {LIMITS[name]:g}: {errors}.")


def measure(config: Config, layers: int) -> dict[str, Any]:
    """Return the errors of F, B and W in each precision that the device supports.

    Args:
        config: of the model; it runs on one device.
        layers: of the model.

    Returns:
        device, and `errors` by precision and op.
    """
    import jax

    replace = msgspec.structs.replace
    kind = jax.devices()[0].device_kind
    config = replace(
        config,
        model=replace(config.model, n_layers=layers),
        parallel=Parallel(schedule="zb_h1", layer_split="even"),
        train=replace(config.train, grad_accum_steps=1, remat="none"),
    )
    able = jax.devices()[0].platform == "cpu" or any(
        name in kind and sheet.fp8 for name, sheet in DEVICES.items()
    )
    want = _gradients(config, None)
    errors = {
        name: _errors(_gradients(config, fp8), want)
        for name, fp8 in _WAYS.items()
        if fp8 == "none" or able
    }
    return {"device": kind, "errors": errors}


def _gradients(config: Config, fp8: str | None) -> Tree:
    """Return all gradients on the host; `fp8` None: of the reference implementation in float32."""
    import jax

    from jaxpipe.pipeline import losses_and_gradients_ref
    from jaxpipe.training.batch_sharder import random_batch
    from jaxpipe.training.trainer import Trainer

    replace = msgspec.structs.replace
    plain = fp8 is None
    model = replace(config.model, attention="xla") if plain else config.model
    dtype = "float32" if plain else "bfloat16"
    train = replace(config.train, compute_dtype=dtype, fp8=fp8 or "none")
    one = replace(config, model=model, train=train)
    trainer = Trainer.resolve(one, jax.devices()[:1])
    params, batch = trainer.init_parameters(), trainer.put(random_batch(trainer.config))
    if plain:
        layers = trainer.layout.unstack(params["layers"])
        step = jax.jit(partial(losses_and_gradients_ref, trainer.pipeline.functions))
        with jax.default_matmul_precision("highest"):
            _, gradients = step(params["embed_head"], layers, batch)
        return jax.device_get(gradients)
    variables = jax.tree.map(jax.numpy.asarray, trainer.model.functions.variables)
    _, gradients, *_ = jax.jit(trainer.pipeline.step)(params, batch, variables)
    layers = trainer.layout.unstack(gradients["layers"])
    return jax.device_get({"embed_head": gradients["embed_head"], "layers": layers})


def _errors(got: Tree, want: Tree) -> dict[str, float]:
    """Return the error of each op, from the gradients that depend on it."""
    import jax

    off = jax.tree.map(_error, got, want)
    return {
        "F": _worst(off["embed_head"]["head"]),
        "B": _worst(off["embed_head"]["embed"]),
        "W": _worst(off["layers"]),
    }


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _worst(errors: Tree) -> float:
    """Return the largest error, or NaN if any is NaN (Python's `max` would depend on the order)."""
    import jax

    return float(np.max(jax.tree.leaves(errors)))
