"""One rank of a measurement, a process of its own: reads commands as JSON lines, answers in kind.

`{"do": "build", "name": key, "kind": ..., "config": ...}` compiles a step and runs it twice,
`"step"` runs it, `"ops"` times the ops, `"peak"` gives the memory of a step, `"rest"` gives back
free memory. Times are of the machine's monotonic clock, which processes share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.bench import memory
from jaxpipe.config import from_builtins
from jaxpipe.contract import Context, Side
from jaxpipe.runtime.environment import use_cpu_devices
from jaxpipe.training.feed import random_batch
from jaxpipe.training.op_timers import OpTimer, TransferTimer, UpdateTimer
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any


class Worker:
    """What one process knows: its compiled steps by name, each with its state and its batch."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[Any, State, Tree]] = {}
        self.timers: Any = None

    def build(self, name: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
        """Compile a step and run it twice; the answer has both losses and the compiler's seconds.

        The `kind` is "trained", as every run of this configuration does it, or "accumulated": no
        pipeline, gradients summed over a scan.
        """
        trainer = trainer_of(config)
        step = {"trained": trainer.train_step, "accumulated": accumulated(trainer)}[kind]
        state, batch = trainer.init(), trainer.put(random_batch(trainer.config))
        begin = time.monotonic()
        compiled = step.lower(state, batch).compile()
        seconds = time.monotonic() - begin
        self.steps[name] = compiled, state, batch
        first, second = self.step(name), self.step(name)
        return second | {"losses": [first["loss"], second["loss"]], "compile": seconds}

    def step(self, name: str) -> dict[str, Any]:
        """Run a step: loss, begin and end."""
        compiled, state, batch = self.steps.pop(name)
        begin = time.monotonic()
        state, metrics = compiled(state, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        end = time.monotonic()
        self.steps[name] = compiled, state, batch
        return {"begin": begin, "end": end, "loss": loss}

    def drop(self, name: str) -> dict[str, Any]:
        """Forget a step and its state."""
        self.steps.pop(name, None)
        return {}

    def rest(self) -> dict[str, Any]:
        """Give back memory that the steps do not need between them."""
        memory.give_back()
        return {}

    def peak(self, name: str) -> dict[str, Any]:
        """Most bytes that this process has during a step, and what of them it has between steps."""
        return memory.peak(lambda: self.step(name))

    def ops(self, config: dict[str, Any]) -> dict[str, Any]:
        """Seconds of every op, of a tick's exchange and of a rank's update."""
        if self.timers is None:
            trainer = trainer_of(config)
            layers = trainer.config.model.n_layers // trainer.mesh.size
            self.timers = (
                OpTimer(trainer, layers=layers),
                TransferTimer(trainer),
                UpdateTimer(trainer, layers),
            )
        ops, transfer, update = self.timers
        return {**ops.seconds(), "transfer": transfer.seconds(), "update": update.seconds()}

    def export(self, path: str, config: dict[str, Any]) -> dict[str, Any]:
        """Write the initial values and the batch of a configuration on one device, for PyTorch."""
        trainer = trainer_of(config)
        state, batch = trainer.init(), random_batch(trainer.config)
        named = {
            "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in where): leaf
            for where, leaf in jax.tree.leaves_with_path(state.params)
        }
        np.savez(Path(path), **named, **batch)
        return {}


def accumulated(trainer: Trainer) -> Any:
    """The same step on one device without a pipeline: `jax.grad`, summed over a scan."""
    functions = trainer.pipeline.functions

    def step(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        count = functions.count(batch)

        def share(params: Tree, microbatch: Tree) -> jax.Array:
            x = functions.embed(params["shared"], microbatch)
            for slot in params["layers"]:
                layer = jax.tree.map(lambda leaf: leaf[0], slot)
                x = trainer.model.layer(layer, x, Context(microbatch)).y
            return functions.head(params["shared"], x, microbatch).sum() / count

        def one(total: Tree, microbatch: Tree) -> tuple[Tree, jax.Array]:
            loss, gradients = jax.value_and_grad(share)(state.params, microbatch)
            return jax.tree.map(jnp.add, total, gradients), loss

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradients, losses = lax.scan(one, zeros, batch)
        return trainer.update(state, losses.sum(), gradients, Side())

    return jax.jit(step, donate_argnums=0)


def trainer_of(config: dict[str, Any]) -> Trainer:
    """The trainer of a configuration in plain values, on the first devices it needs."""
    converted = from_builtins(config)
    parallel = converted.parallel
    return Trainer(converted, tuple(jax.devices()[: parallel.pp * parallel.dp * parallel.tp]))


def serve(kind: Callable[[], Any]) -> None:
    """Have such a worker do commands until the input ends; its methods are their names."""
    how = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    use_cpu_devices(1)
    if how["size"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{how['port']}", how["size"], how["rank"])
    worker = kind()
    print(json.dumps({"ready": jax.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    serve(Worker)
