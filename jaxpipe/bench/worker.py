"""One rank of a measurement, a process of its own: reads commands as JSON lines, answers in kind.

`{"do": "build", "name": key, "microbatches": M, ...}` compiles and runs a step once, `"step"` runs
it, `"ops"` times the ops. Times are of the machine's monotonic clock, which processes share.
"""

import json
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.bench.ops import OpTimer, TransferTimer
from jaxpipe.bench.workload import VARIANTS, OpTimes, Workload
from jaxpipe.model import Decoder
from jaxpipe.parallel import StageLayout, VocabularyParallel, make_mesh
from jaxpipe.pipeline import Execution, Pipeline, StageFunctions
from jaxpipe.runtime import use_cpu_devices
from jaxpipe.tensor import ONE_DEVICE

Tree = Any


class Worker:
    """What one process knows: the model's values, and its compiled steps by name."""

    def __init__(self, workload: Workload, pp: int):
        self.workload, self.pp = workload, pp
        self.mesh = make_mesh(pp)
        decoder = Decoder(workload.model)
        self.functions = _functions(decoder)
        key = jax.random.key(0)
        on_host = lambda tree: jax.tree.map(np.asarray, tree)  # noqa: E731
        self.shared = on_host(jax.jit(decoder.init_ends)(key))
        one = jax.jit(decoder.init_layer)
        self.layers = [on_host(one(key, i)) for i in range(workload.model.n_layers)]
        self.steps: dict[str, Any] = {}
        self.timers: Any = None

    def build(self, name: str, microbatches: int, **how: Any) -> dict[str, Any]:
        """Compile a step and run it once; the answer has its loss."""
        make = self._single if how.get("variant") is None else self._pipelined
        self.steps[name] = make(self._batch(microbatches), **how)
        return self.step(name)

    def step(self, name: str) -> dict[str, Any]:
        """Run a step: loss, begin and end."""
        run, arguments = self.steps[name]
        begin, cpu = time.monotonic(), time.process_time()
        losses, _ = jax.block_until_ready(run(*arguments))
        end, cpu = time.monotonic(), time.process_time() - cpu
        return {"begin": begin, "end": end, "cpu": cpu, "loss": float(np.sum(losses))}

    def drop(self, name: str) -> dict[str, Any]:
        """Forget a step and its arguments."""
        self.steps.pop(name, None)
        return {}

    def ops(self) -> dict[str, Any]:
        """Seconds of every op and of a tick's exchange."""
        if self.timers is None:
            batch = self._batch(1)
            put = lambda tree: jax.tree.map(jnp.asarray, tree)  # noqa: E731
            microbatch = put(jax.tree.map(lambda leaf: leaf[0], batch))
            held = put(tuple(self.layers[: self.workload.model.n_layers // self.pp]))
            shared = put(self.shared)
            message = jax.eval_shape(self.functions.embed, shared, microbatch)
            self.timers = (
                OpTimer(self.functions, shared, held, microbatch),
                TransferTimer(self.mesh, message),
            )
        ops, transfer = self.timers
        return ops.seconds() | {"transfer": transfer.seconds()}

    def _batch(self, microbatches: int) -> dict[str, np.ndarray]:
        w = self.workload
        shape = microbatches, w.microbatch_size, w.seq_len + 1
        tokens = np.random.default_rng(0).integers(0, w.model.vocab_size, shape, np.int32)
        return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}

    def _pipelined(
        self, batch: Tree, *, variant: str, times: dict[str, float] | None = None
    ) -> tuple[Any, Tree]:
        chosen = VARIANTS[variant]
        layers = chosen.layers(self.workload.model.n_layers, self.pp)
        model, costs = self.workload.model, None
        if times:
            costs = chosen.costs(OpTimes(**times), model.n_layers, self.pp, split=True)
        schedule = chosen.build(self.pp, len(batch["inputs"]), costs)
        ends = VocabularyParallel.of(ONE_DEVICE, self.pp) if chosen.vocab_parallel else None
        functions = _functions(Decoder(model, end_devices=ends))
        execution = Execution(in_flight=chosen.in_flight, vocab_parallel=chosen.vocab_parallel)
        pipeline = Pipeline(functions, schedule, self.mesh, layers, execution)
        slots = StageLayout(layers, schedule.placement).stack(self.layers)
        params = {"shared": self.shared, "layers": slots}
        specs = pipeline.sharding.specs(params)
        arguments = (
            jax.tree.map(self._put, params, specs),
            jax.tree.map(lambda leaf: self._put(leaf, PartitionSpec()), batch),
        )
        return jax.jit(pipeline.losses_and_gradients), arguments

    def _put(self, leaf: Any, spec: PartitionSpec) -> jax.Array:
        leaf, sharding = np.asarray(leaf), NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    def _single(self, batch: Tree) -> tuple[Any, Tree]:
        """The same step on one device: no pipeline, gradients summed over a scan."""
        functions, count = self.functions, batch["targets"].size

        def share(params: Tree, microbatch: Tree) -> jax.Array:
            x = functions.embed(params["shared"], microbatch)
            for layer in params["layers"]:
                x = functions.layer(layer, x, microbatch)
            return functions.head(params["shared"], x, microbatch) / count

        def step(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
            def one(total: Tree, microbatch: Tree) -> tuple[Tree, jax.Array]:
                loss, gradients = jax.value_and_grad(share)(params, microbatch)
                return jax.tree.map(jnp.add, total, gradients), loss

            total, losses = lax.scan(one, jax.tree.map(jnp.zeros_like, params), batch)
            return losses, total

        params = {"shared": self.shared, "layers": self.layers}
        return jax.jit(step), jax.tree.map(jnp.asarray, (params, batch))


def _functions(decoder: Decoder) -> StageFunctions:
    return StageFunctions(decoder.embed, decoder.layer, decoder.head, decoder.count, decoder.cuts)


def main() -> None:
    """Serve commands until the input ends."""
    how = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    use_cpu_devices(1)
    if how["size"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{how['port']}", how["size"], how["rank"])
    worker = Worker(msgspec.convert(how["workload"], Workload), how["size"])
    print(json.dumps({"ready": jax.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
