"""The process of one rank of a measurement: it reads commands and writes answers as JSON lines.

`{"do": "build", "name": key, "kind": ..., "config": ...}` compiles a step and runs it twice,
`"build_sleeping"` compiles a pipeline whose layers sleep, `"step"` runs a step, `"ops"` times the
ops, and so on.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.config import from_builtins
from jaxpipe.core.contract import Aux, Context
from jaxpipe.lab.bench.serving import StepWorker, serve
from jaxpipe.lab.bench.sleeping import SleepingStep, compile_sleeping_step
from jaxpipe.run.measure.op_timers import OpTimer
from jaxpipe.run.measure.step_timers import TransferTimer, UpdateTimer
from jaxpipe.runtime.environment import use_cpu_devices
from jaxpipe.schedules import ScheduleVariant
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any


class BenchWorker(StepWorker):
    """The process's compiled steps by name, and its op timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: Any = None

    def build(self, name: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
        """Compile a step and run it twice.

        Args:
            name: key of the step.
            kind: "trained", the step of a training run, or "accumulated", without a pipeline and
                with gradients summed over a scan.
            config: in plain values.

        Returns:
            both losses, seconds of the compiler, and begin and end of the second step.
        """
        trainer = build_trainer(config)
        step = trainer.train_step if kind == "trained" else compile_accumulated_step(trainer)
        state, batch = trainer.init(), trainer.put(random_batch(trainer.config))
        begin = time.monotonic()
        compiled = step.lower(state, batch).compile()
        seconds = time.monotonic() - begin

        def run() -> float:
            nonlocal state
            state, metrics = compiled(state, batch)
            return float(jax.block_until_ready((state, metrics))[1]["loss"])

        self.steps[name] = run
        return self.step_twice(name) | {"compile": seconds}

    def build_sleeping(self, name: str, work: dict[str, Any]) -> dict[str, Any]:
        """Compile a step of the given `SleepingStep` fields and run it once."""
        variant = ScheduleVariant(*work["variant"])
        self.steps[name] = compile_sleeping_step(SleepingStep(**work | {"variant": variant}))
        return self.step(name)

    def ops(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return seconds of every op, of a tick's transfer and of a rank's update."""
        if self.timers is None:
            trainer = build_trainer(config)
            layers = trainer.config.model.n_layers // trainer.mesh.size
            self.timers = (
                OpTimer(trainer, layers=layers),
                TransferTimer(trainer),
                UpdateTimer(trainer, layers),
            )
        ops, transfer, update = self.timers
        return {**ops.seconds(), "transfer": transfer.seconds(), "update": update.seconds()}

    def export(self, path: str, config: dict[str, Any]) -> dict[str, Any]:
        """Write the initial parameters and the batch on one device to an npz file, for PyTorch."""
        trainer = build_trainer(config)
        params, batch = trainer.init_parameters(), random_batch(trainer.config)
        layers = dict(enumerate(trainer.layout.unstack(params["layers"])))
        leaves = jax.tree.leaves_with_path({"embed_head": params["embed_head"], "layers": layers})
        named = {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in leaves}
        np.savez(path, **(named | batch))
        return {}


def compile_accumulated_step(trainer: Trainer) -> Any:
    """Return the jitted step without a pipeline: gradients by `jax.grad`, summed over a scan."""
    functions = trainer.pipeline.functions
    kind = functions.kinds_by_name["layer"]

    def step(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        count = functions.count(batch)

        def share(params: Tree, microbatch: Tree) -> jax.Array:
            x = functions.embed(params["embed_head"], microbatch)
            for layer in trainer.layout.unstack(params["layers"]):
                x = kind.layer(layer, x, Context(microbatch)).y
            return functions.head(params["embed_head"], x, microbatch).sum() / count

        def one(total: Tree, microbatch: Tree) -> tuple[Tree, jax.Array]:
            loss, gradients = jax.value_and_grad(share)(state.params, microbatch)
            return jax.tree.map(jnp.add, total, gradients), loss

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradients, losses = lax.scan(one, zeros, batch)
        return trainer.update(state, losses.sum(), gradients, Aux())

    return jax.jit(step, donate_argnums=0, compiler_options=trainer.compiler_options)


def build_trainer(config: dict[str, Any]) -> Trainer:
    """Return the trainer of a configuration in plain values, on the first devices it needs."""
    converted = from_builtins(config)
    return Trainer.resolve(converted, jax.devices()[: converted.parallel.devices])


def connect(rank: int, size: int, port: int) -> BenchWorker:
    """Return a worker with one CPU device, connected to the other processes."""
    use_cpu_devices(1)
    if size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    return BenchWorker()


if __name__ == "__main__":
    serve(connect, jax.__version__)
