"""A pipeline whose layers sleep for given seconds instead of computing (`bench clockwork`)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import batch_spec, make_mesh
from jaxpipe.core.schedule import Action, Costs, Lockstep, Op, Schedule
from jaxpipe.core.schedule.scan import optimize_pace
from jaxpipe.schedules import ScheduleVariant, build, find_family

# A message takes no tick of its own. A permute on CPUs waits for the rank's neighbours, and a
# tick's two permutes run one after the other: within a few percent a barrier of all ranks.
_ON_CPUS = Lockstep(pairs=False, synchronizes_all=True)


@dataclass(frozen=True)
class SleepingStep:
    """A step to measure: a schedule, and the seconds that its ops sleep.

    Attributes:
        variant: of the schedule: its family, stages per rank and limit on live microbatches.
        ranks: of the pipeline.
        microbatches: of each step.
        F, B, W: seconds per microbatch and rank, divided equally among the rank's stages.
    """

    variant: ScheduleVariant
    ranks: int
    microbatches: int
    F: float
    B: float
    W: float

    @property
    def seconds(self) -> float:
        """Seconds of F, B and W on one rank."""
        return self.microbatches * (self.F + self.B + self.W)

    @cached_property
    def lockstep(self) -> Lockstep:
        """Lockstep with phased permutes if possible and shorter: a rank waits for one neighbour."""
        unphased = replace(_ON_CPUS, in_flight=self.variant.in_flight)
        free = replace(unphased, synchronizes_all=False)
        phased = optimize_pace(self.schedule, self.costs, free, phased=True)
        return phased if phased.phases > 1 else unphased

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; a searched family is searched for these costs."""
        family, stages = self.variant.family, self.variant.virtual_stages
        how: dict[str, Any] = {"virtual_stages": stages} if stages else {}
        if find_family(family).is_searched:
            how |= {"costs": Costs(F=self.F, B=self.B, W=self.W), "lockstep": _ON_CPUS}
        return build(family, pp=self.ranks, microbatches=self.microbatches, **how)

    @property
    def costs(self) -> Costs:
        """Seconds of a stage's ops."""
        part = self.ranks / self.schedule.stages
        return Costs(F=self.F * part, B=self.B * part, W=self.W * part)


def compile_sleeping_step(todo: SleepingStep) -> Callable[..., None]:
    """Return the compiled step as a function; with `asleep=False` its ops do not sleep."""
    is_asleep = [True]
    mesh = make_mesh(pp=todo.ranks)
    pipeline = Pipeline(
        _functions(todo.costs, is_asleep), todo.schedule, mesh, (1,) * todo.schedule.stages,
        Execution(todo.lockstep),
    )  # fmt: skip
    layers = [{"w": np.ones((1, 1), np.float32)}] * todo.schedule.stages
    stacked = pipeline.layout(0).stack(layers)
    params = {"embed_head": {"scale": np.ones((1, 1), np.float32)}, "layers": stacked}
    params = jax.tree.map(_put, params, pipeline.sharding.named_shardings(params))
    inputs = np.ones((todo.schedule.microbatches, 1, 1), np.float32)
    batch = {"inputs": _put(inputs, NamedSharding(mesh, batch_spec()))}
    compiled = jax.jit(pipeline.step).lower(params, batch).compile()

    def run(*, asleep: bool = True) -> None:
        is_asleep[0] = asleep
        jax.block_until_ready(compiled(params, batch))

    return run


def _functions(costs: Costs, is_asleep: list[bool]) -> StageFunctions:
    """Return a model of one layer kind whose F, B and W sleep for the given seconds."""

    def slept(op: Op, x: jax.Array) -> jax.Array:
        """Return x after a sleep that starts when x is available."""
        seconds = costs.action_time(Action(op, 0, 0))  # stages are alike

        def sleep(x: jax.Array) -> np.ndarray:
            if is_asleep[0]:
                time.sleep(seconds)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return slept(Op.F, x @ w)

    product.defvjp(
        lambda w, x: (product(w, x), (w, x)),
        lambda kept, dy: (slept(Op.W, kept[1].T @ dy), slept(Op.B, dy @ kept[0].T)),
    )
    return StageFunctions(
        embed=lambda shared, rows: rows["inputs"] * shared["scale"],
        kinds=LayerKind(lambda params, x, context: LayerOutput(product(params["w"], x))),
        head=lambda shared, x, rows: jnp.sum(x),
        count=lambda rows: jnp.float32(rows["inputs"].size),
    )


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    full = np.asarray(leaf)
    return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])
