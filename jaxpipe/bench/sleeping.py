"""One rank of `bench clockwork`, a process of its own: a pipeline whose layers sleep.

`{"do": "build", "name": key, "work": ...}` with the fields of a `Work` compiles a step and runs it
once, `"step"` runs it, with `"asleep": false` without any sleep.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpipe.bench.worker import serve
from jaxpipe.contract import Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.parallel import batch_spec, make_mesh
from jaxpipe.pipeline import Execution, Pipeline
from jaxpipe.schedule import Costs, Lockstep, Schedule, build, family_of, fused
from jaxpipe.schedule.scan import paced

Tree = Any


@dataclass(frozen=True)
class Work:
    """A step: a schedule, and seconds of F, B and W of one microbatch on one rank.

    A rank with several stages has a part of them in each. Of several `steps` each begins while the
    one before it ends, as `fused` says, with updates that take no time.
    """

    family: str
    ranks: int
    microbatches: int
    F: float
    B: float
    W: float
    in_flight: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1

    @property
    def seconds(self) -> float:
        """What a rank does in all steps."""
        return self.steps * self.microbatches * (self.F + self.B + self.W)

    @property
    def _in_every_tick(self) -> Lockstep:
        """As on CPUs, where a message takes no tick of its own.

        A permute waits there for this rank's neighbours, and the two of a tick follow each other:
        that takes as long as if all ranks met, to a few percent.
        """
        return Lockstep(in_flight=self.in_flight, pairs=False, meets=True)

    @cached_property
    def lockstep(self) -> Lockstep:
        """By turns, where that is possible and shorter: then a rank waits for one neighbour."""
        if self.steps > 1:
            return self._in_every_tick
        found = paced(
            self.schedule, self.costs, replace(self._in_every_tick, meets=False), turns=True
        )
        return found if found.turns > 1 else self._in_every_tick

    @cached_property
    def schedule(self) -> Schedule:
        """The orders; those that are searched are so for these costs."""
        sizes = {"pp": self.ranks, "microbatches": self.microbatches}
        ops = Costs(F=self.F, B=self.B, W=self.W)
        how: dict[str, Any] = {}
        if family_of(self.family).searched:
            how = {"costs": ops, "lockstep": replace(self._in_every_tick, in_flight=None)}
        one = build(self.family, **sizes, **how, **self.options)
        return one if self.steps == 1 else fused(one, self.steps)

    @property
    def costs(self) -> Costs:
        """Seconds of a stage's ops."""
        part = self.ranks / self.schedule.stages
        return Costs(F=self.F * part, B=self.B * part, W=self.W * part)

    def as_words(self) -> dict[str, Any]:
        """For a process that is told of it."""
        return asdict(self)


class Worker:
    """What one process knows: its compiled steps by name, each with what it is given."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[Any, Tree, Tree]] = {}
        self.asleep = True

    def build(self, name: str, work: dict[str, Any]) -> dict[str, Any]:
        """Compile a step and run it once."""
        todo = Work(**work)
        mesh = make_mesh(pp=todo.ranks)
        pipeline = Pipeline(
            self.functions(todo.costs), todo.schedule, mesh, (1,) * todo.schedule.stages,
            Execution(todo.lockstep),
        )  # fmt: skip
        layers = [{"w": np.ones((1, 1), np.float32)}] * todo.schedule.stages
        stacked = pipeline.layout(0).stack(layers)
        params = {"shared": {"scale": np.ones((1, 1), np.float32)}, "layers": stacked}
        batch = {"inputs": np.ones((todo.schedule.microbatches, 1, 1), np.float32)}
        params = jax.tree.map(_placed, params, pipeline.sharding.shardings(params))
        batch = jax.tree.map(lambda leaf: _placed(leaf, NamedSharding(mesh, batch_spec())), batch)
        step = pipeline.step if todo.steps == 1 else partial(_updated, pipeline)
        self.steps[name] = jax.jit(step).lower(params, batch).compile(), params, batch
        return self.step(name)

    def step(self, name: str, *, asleep: bool = True) -> dict[str, Any]:
        """Run a step: begin and end."""
        compiled, params, batch = self.steps[name]
        self.asleep = asleep
        begin = time.monotonic()
        jax.block_until_ready(compiled(params, batch))
        return {"begin": begin, "end": time.monotonic()}

    def functions(self, costs: Costs) -> StageFunctions:
        """A model of one kind of layer, whose F, B and W take these seconds."""
        slept_f, slept_b, slept_w = (partial(self._slept, of) for of in (costs.F, costs.B, costs.W))

        @jax.custom_vjp
        def product(w: jax.Array, x: jax.Array) -> jax.Array:
            return slept_f(x @ w)

        product.defvjp(
            lambda w, x: (product(w, x), (w, x)),
            lambda kept, dy: (slept_w(kept[1].T @ dy), slept_b(dy @ kept[0].T)),
        )

        def layer(params: Tree, x: jax.Array, context: Context) -> LayerOutput:
            return LayerOutput(product(params["w"], x))

        return StageFunctions(
            embed=lambda shared, rows: rows["inputs"] * shared["scale"],
            kinds=LayerKind(layer),
            head=lambda shared, x, rows: jnp.sum(x),
            count=lambda rows: jnp.float32(rows["inputs"].size),
        )

    def _slept(self, seconds: float, x: jax.Array) -> jax.Array:
        """x, so many seconds after it is there."""

        def sleep(x: jax.Array) -> np.ndarray:
            if self.asleep:
                time.sleep(seconds)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _updated(pipeline: Pipeline, params: Tree, batch: Tree) -> Tree:
    """Steps that overlap, each of which changes what the next one reads."""

    def update(gradients: Tree, moments: Tree, params: Tree) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda leaf, by: leaf - 1e-6 * by, params, gradients), moments

    return pipeline.updated(params, (), batch, update)


def _placed(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


if __name__ == "__main__":
    serve(Worker)
