"""Times of the ops of one microbatch or sequence slice, each measured in a loop of its own.

All devices of a mesh run an op at once, including its collectives, as in the executor. F writes its
residuals to ring buffers; gradient ops read them there and add to gradient sums. Every iteration
uses another slot than the one before, so that XLA cannot hoist work out of the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.core.contract import Context, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.action_values import ActionInputs, BackwardOutputs, ForwardOutputs
from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.ring_buffers import RingArrays, RingBuffers
from jaxpipe.core.executor.stage import EmbedHeadFunction, add_gradients
from jaxpipe.core.executor.step_data import Mean
from jaxpipe.core.executor.traced_kind import (
    BufferedKind,
    TracedKind,
    embed_head_of,
    empty_aux,
    empty_statistics,
)
from jaxpipe.core.mesh.flags import is_trained
from jaxpipe.core.mesh.sharding import param_specs_of
from jaxpipe.core.schedule import Buffers, Op, TableRow
from jaxpipe.core.schedule.row import RecomputeColumns
from jaxpipe.core.split.crossing import Policy
from jaxpipe.core.split.split import Cotangent
from jaxpipe.planning.cost.trace import policies_of, rows_of
from jaxpipe.run.measure.timed_loop import SLOTS, Loop, TimedLoop, iterations_of, repeated
from jaxpipe.training.trainer import Trainer

Tree = Any
_EVERY = Buffers(*[SLOTS] * len(Buffers._fields))
_OF_LAYER = ("F", "B", "W", "BW", "R")  # R: if the run recomputes ahead of B
_OF_ENDS = ("head", "embed", "embed_gradient")


def op_seconds(trainer: Trainer, *, layers: int = 1, repeats: int = 5) -> Tree:
    """Median time of each op [s], in the form of `OpSeconds` without `transfer`.

    The times of `layer` are means over the model's layers; each kind is timed with `layers` layers
    per iteration of a loop, `repeats` times. If embedding and head are vocabulary-parallel over pp,
    their times are `pp` times those of a pipeline rank.
    """
    iterations = iterations_of(trainer.mesh.devices.flat[0].platform)
    kinds = trainer.model.functions.layer_kinds(trainer.config.model.pipeline_layers)
    of_kinds = []
    for kind in dict.fromkeys(kinds):
        timer = OpTimer(trainer, layers=layers, iterations=iterations, kind=kind)
        rounds = [timer.seconds() for _ in range(repeats)]
        of_kinds.append((kinds.count(kind) / len(kinds), rounds))
        del timer  # frees its arrays on the devices
    seconds: dict[str, Any] = {
        name: median(each[name] for _, rounds in of_kinds for each in rounds)
        * max(1, trainer.config.parallel.vocab_shared_by)
        for name in _OF_ENDS
    }
    seconds["layer"] = {
        name: sum(
            share * median(each["layer"][name] for each in rounds) for share, rounds in of_kinds
        )
        for name in of_kinds[0][1][0]["layer"]
    }
    return seconds


class OpTimer:
    """Compiled loops of every op on `layers` layers of a kind, for one microbatch.

    All devices of the trainer's mesh run the loops with the shapes of a step. `kind` None selects
    the kind of the first layer.
    """

    def __init__(
        self, trainer: Trainer, *, layers: int, iterations: int = 2, kind: str | None = None
    ):
        functions, config = trainer.pipeline.traced_functions, trainer.config
        kind = kind or functions.layer_kinds(config.model.pipeline_layers)[0]
        alone = replace(functions, kinds={kind: functions.kinds_by_name[kind]}, order=None)
        rows, policies = rows_of(config, functions), policies_of(config)
        self._layers = layers
        every = PartitionSpec()

        def on_mesh(function: Callable[..., Tree], arguments: int) -> Callable[..., Tree]:
            specs = (every,) * arguments
            return jax.shard_map(
                function, mesh=trainer.mesh, in_specs=specs, out_specs=every, check_vma=False
            )

        def loops(parts: Tree) -> tuple[dict[str, Callable[..., Tree]], dict[str, Tree], Tree]:
            microbatch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rows)
            return _loops(
                alone, parts["embed_head"], parts["layers"], microbatch, policies, iterations
            )

        def compiled(name: str) -> Loop:
            def run(state: Tree, fixed: Tree) -> Tree:
                return loops(fixed)[0][name](state, fixed)

            options = trainer.compiler_options
            return jax.jit(on_mesh(run, 2), donate_argnums=0, compiler_options=options)

        parts = jax.jit(on_mesh(partial(_parts, trainer, kind, layers), 0))()
        states, fixed = jax.jit(on_mesh(lambda parts: loops(parts)[1:], 1))(parts)
        self._loops = {
            name: TimedLoop(compiled(name), state, fixed, iterations)
            for name, state in states.items()
        }

    def seconds(self) -> dict[str, Any]:
        """Time of each op [s], in the form of `OpSeconds`; those of `layer` are for one layer."""
        seconds: dict[str, Any] = {"layer": {}}
        for name, loop in self._loops.items():
            each = loop.seconds()
            if name in _OF_LAYER:
                seconds["layer"][name] = each / self._layers
            else:
                seconds[name] = each
        return seconds


def _parts(trainer: Trainer, kind: str, layers: int) -> Tree:
    """A device's shards of embed_head and of `layers` layers, in the compute dtype."""
    key, model = jax.random.key(0), trainer.model
    dtype = jnp.dtype(trainer.config.train.compute_dtype)

    def part(whole: jax.Array, leaf: ParamSpec) -> jax.Array:
        for axis, dim in leaf.sharded:
            size = whole.shape[dim] // trainer.mesh.shape[axis]
            whole = lax.slice_in_dim(whole, 0, size, axis=dim)
        return whole.astype(dtype)

    def parts(tree: Tree, leaves: Tree, *, of_layer: bool) -> Tree:
        return jax.tree.map(part, tree, param_specs_of(leaves, tree, of_layer=of_layer))

    of_kind = model.functions.kinds_by_name[kind].param_specs
    every = (model.init_layer(key, jnp.int32(index), kind) for index in range(layers))
    return {
        "embed_head": parts(
            model.init_embed_head(key), model.functions.embed_head_specs, of_layer=False
        ),
        "layers": tuple(parts(layer, of_kind, of_layer=True) for layer in every),
    }


def _loops(
    functions: StageFunctions,
    embed_head: Tree,
    layers: tuple[Tree, ...],
    microbatch: Tree,
    policies: tuple[Policy, Policy | None],
    iterations: int,
) -> tuple[dict[str, Callable[..., Tree]], dict[str, Tree], Tree]:
    """Build the loops of all ops, `iterations` iterations each.

    Returns functions `(state, fixed) -> state` by op, initial states by op, and `fixed`.
    """
    x = jax.jit(functions.embed)(embed_head, microbatch)
    ops = _LayerOps.trace(functions, embed_head, layers[0], x, microbatch, policies)
    rings = tuple(_filled(ops.kind.rings.empty(slot)) for slot in range(len(layers)))
    zeros = _zeros(layers), embed_head_of(ops.kind.kind, _zeros(embed_head))
    inputs = jnp.stack([x] * SLOTS)
    fixed = {"layers": layers, "embed_head": embed_head, "microbatch": microbatch, "inputs": inputs}
    states: dict[str, tuple[Callable[..., Tree], Tree]] = {
        "F": (ops.forward, (x, rings)),
        "B": (partial(ops.gradient, Op.B), (x, rings, zeros)),
        "W": (partial(ops.gradient, Op.W), (x, rings, zeros)),
        "BW": (partial(ops.gradient, Op.BW), (x, rings, zeros)),
    }
    if ops.kind.split.residuals.for_r is not None:
        states["R"] = ops.recompute, rings
    states |= _embed_head_ops(functions, embed_head, x, microbatch)
    runs = {name: repeated(_by_row(run), iterations) for name, (run, _) in states.items()}
    return runs, {name: state for name, (_, state) in states.items()}, fixed


@dataclass(frozen=True)
class _LayerOps:
    """F and the gradient ops of layers of one kind, as functions `(state, fixed, row) -> state`."""

    kind: BufferedKind
    variables: Tree

    @classmethod
    def trace(
        cls,
        functions: StageFunctions,
        embed_head: Tree,
        params: Tree,
        x: jax.Array,
        microbatch: Tree,
        policies: tuple[Policy, Policy | None],
    ) -> "_LayerOps":
        """Trace the only kind of the functions with the parameters of one layer."""
        (kind,) = functions.kinds_by_name.values()
        index: Any = jax.ShapeDtypeStruct((), jnp.int32)
        context = Context(microbatch, index, None, functions.variables, embed_head)
        trained = is_trained(param_specs_of(functions.embed_head_specs, embed_head, of_layer=False))
        policy, recomputed = policies
        traced = TracedKind.trace("layer", kind, params, x, context, policy, trained, recomputed)
        stored = traced.split.residuals, traced.split.stash
        rings = RingBuffers.of(*stored, traced.state, [_EVERY], pairs=False)
        return cls(BufferedKind(**vars(traced), rings=rings), functions.variables)

    def forward(self, state: Tree, fixed: Tree, row: TableRow) -> Tree:
        """F of all layers; the state is x and the ring buffers."""
        (x, rings), plan = state, self.kind.rings
        parts = tuple(plan.written_by(own, Op.F) for own in rings)
        before = ForwardOutputs(x, parts, empty_aux([self.kind], SLOTS), jnp.float32(0))
        outputs = self._chunk(fixed).forward(self._inputs(fixed, row), before)
        after = (plan.with_written(own, Op.F, part) for own, part in zip(rings, outputs.rings))
        return outputs.y, tuple(after)

    def gradient(self, op: Op, state: Tree, fixed: Tree, row: TableRow) -> Tree:
        """B, W or BW of all layers; the state is dy, the ring buffers and the gradient sums."""
        (dy, rings, (totals, read)), plan = state, self.kind.rings
        parts = tuple(plan.written_by(own, op) for own in rings)
        observed = empty_statistics([self.kind], self.variables)
        before = BackwardOutputs(dy, parts, totals, observed, read)
        outputs = self._chunk(fixed).gradient(
            op, self._inputs(fixed, row), before,
            lambda layer, part: plan.read(
                plan.with_written(rings[layer.ring], op, part), row, op, layer.first
            ),
        )  # fmt: skip
        after = (plan.with_written(own, op, part) for own, part in zip(rings, outputs.rings))
        return outputs.dx, tuple(after), (outputs.grad_sums, outputs.read_sums)

    def recompute(self, state: Tree, fixed: Tree, row: TableRow) -> Tree:
        """R of all layers; the state is the ring buffers."""
        plan = self.kind.rings
        parts = tuple(plan.written_by(own, Op.R) for own in state)
        new = self._chunk(fixed).recompute(self._inputs(fixed, row), row.for_b_read, parts)
        return tuple(plan.with_written(own, Op.R, part) for own, part in zip(state, new))

    def _chunk(self, fixed: Tree) -> Chunk:
        every = enumerate(fixed["layers"])
        return Chunk(tuple(LayerRun(self.kind, own, jnp.full(1, i), None, i) for i, own in every))

    def _inputs(self, fixed: Tree, row: TableRow) -> ActionInputs:
        one = Mean(jnp.float32(1), jnp.float32(1))
        means = {self.kind.name: dict.fromkeys(self.kind.output.aux.losses, one)}
        return ActionInputs(row, fixed["microbatch"], self.variables, means, fixed["embed_head"])


def _embed_head_ops(
    functions: StageFunctions, embed_head: Tree, x: jax.Array, microbatch: Tree
) -> dict[str, tuple[Callable[..., Tree], Tree]]:
    """For each op of embedding and head, `(state, fixed, row) -> state` and its initial state."""
    trained = is_trained(param_specs_of(functions.embed_head_specs, embed_head, of_layer=False))
    embed = EmbedHeadFunction.trace(functions.embed, trained, embed_head, microbatch)
    head = EmbedHeadFunction.trace(functions.head, trained, embed_head, x, microbatch)
    head_split = head.split(embed_head, x, microbatch)

    def leave(state: Tree, fixed: Tree, row: TableRow) -> Tree:
        y = buffers.read(fixed["inputs"], row.for_b_read)
        context = Context(fixed["microbatch"], embed_head=fixed["embed_head"])
        output, residuals = head_split.forward(None, y, context)
        seed = Cotangent(jnp.ones_like(output.y))
        dy, used = head_split.backward(None, context, residuals, seed)
        return output.y, dy.value, add_gradients(state[2], used.embed_head)

    def enter(state: Tree, fixed: Tree, row: TableRow) -> Tree:
        other = lambda leaf: leaf.at[(0,) * leaf.ndim].set(row.for_b_read)  # noqa: E731
        tokens = jax.tree.map(other, fixed["microbatch"])
        return functions.embed(fixed["embed_head"], tokens)

    def enter_gradient(state: Tree, fixed: Tree, row: TableRow) -> Tree:
        dx = buffers.read(fixed["inputs"], row.for_b_read)
        return add_gradients(state, embed.gradients(fixed["embed_head"], fixed["microbatch"], dx))

    return {
        "head": (leave, (jnp.float32(0), x, _zeros(embed_head))),
        "embed": (enter, x),
        "embed_gradient": (enter_gradient, _zeros(embed_head)),
    }


def _zeros(tree: Tree) -> Tree:
    """Zeros for gradient sums, float32."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree)


def _filled(rings: RingArrays) -> RingArrays:
    return jax.tree.map(lambda ring: jnp.full_like(ring, 0.01), rings)


def _by_row(run: Callable[..., Tree]) -> Callable[[Tree, Tree, jax.Array], Tree]:
    """The op on the same slot of every ring buffer."""

    def on_slot(state: Tree, fixed: Tree, slot: jax.Array) -> Tree:
        every: Any = [slot] * len(TableRow._fields)
        recompute = RecomputeColumns(slot, slot, slot, slot)
        return run(state, fixed, TableRow(*every)._replace(recompute=recompute))

    return on_slot
