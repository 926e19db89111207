"""Seconds of the ops of one microbatch, each alone in a loop, as the executor runs them.

F leaves its residuals in a ring, gradients read them there and add to sums. The loops read and
write another slot every turn, so that nothing of a turn can be moved out of its loop.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.contract import Context, Side, StageFunctions
from jaxpipe.parallel import PP
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.chunk import Chunk, Given, Gradients, LayerSlot, Made
from jaxpipe.pipeline.cut import POLICIES, Policy
from jaxpipe.pipeline.kind import RunKind
from jaxpipe.pipeline.rings import RingPlan, Rings
from jaxpipe.pipeline.split import Cotangent
from jaxpipe.pipeline.stage import SharedPart
from jaxpipe.schedule import Buffers, Op, Row
from jaxpipe.training.trainer import State, Trainer

Tree = Any
_SLOTS = 2
_EVERY = Buffers(*[_SLOTS] * len(Buffers._fields))
_OF_LAYER = ("F", "B", "W", "BW")


class OpTimer:
    """Compiled loops of every op over `layers`, at the shapes of one microbatch."""

    def __init__(
        self,
        functions: StageFunctions,
        shared: Tree,
        layers: tuple[Tree, ...],
        microbatch: Tree,
        *,
        policy: Policy = POLICIES["none"],
        turns: int = 2,
    ):
        self._layers, self._turns = len(layers), turns
        self._loops = {
            name: (jax.jit(loop, donate_argnums=0), state, constants)
            for name, (loop, state, constants) in _loops(
                functions, shared, layers, microbatch, policy, turns
            ).items()
        }
        for name in self._loops:
            self._run(name)

    @classmethod
    def of(cls, trainer: Trainer, *, layers: int, turns: int = 2) -> Self:
        """The ops of a run on one device: its microbatch, compute dtype and remat."""
        key, functions = jax.random.key(0), trainer.pipeline.functions
        dtype = trainer.execution.compute_dtype
        cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)  # noqa: E731
        kind = trainer.layout.kinds[0]
        layer = jax.jit(lambda index: cast(trainer.model.init_layer(key, index, kind)))
        train = trainer.config.train
        tokens = jnp.zeros((train.microbatch_size, train.seq_len), jnp.int32)
        return cls(
            functions,
            jax.jit(lambda: cast(trainer.model.init_ends(key)))(),
            tuple(layer(index) for index in range(layers)),
            {"inputs": tokens, "targets": tokens},
            policy=POLICIES[train.remat],
            turns=turns,
        )

    def seconds(self) -> dict[str, Any]:
        """Seconds of each op as `OpSeconds` has them: those of `layer` are of one layer."""
        found: dict[str, Any] = {"layer": {}}
        for name in self._loops:
            begin = time.perf_counter()
            self._run(name)
            each = (time.perf_counter() - begin) / self._turns
            if name in _OF_LAYER:
                found["layer"][name] = each / self._layers
            else:
                found[name] = each
        return found

    def _run(self, name: str) -> None:
        loop, state, constants = self._loops[name]
        self._loops[name] = loop, jax.block_until_ready(loop(state, constants)), constants


def _loops(
    functions: StageFunctions,
    shared: Tree,
    layers: tuple[Tree, ...],
    microbatch: Tree,
    policy: Policy,
    turns: int,
) -> dict[str, tuple[Callable[..., Tree], Tree, Tree]]:
    """For each op `(state, constants) -> state` that runs it `turns` times, and its arguments."""
    x, (kind,) = jax.jit(functions.embed)(shared, microbatch), functions.by_name.values()
    context = Context(microbatch, jax.ShapeDtypeStruct((), jnp.int32))
    kind = RunKind.trace("layer", kind, layers[0], x, context, policy)
    embed = SharedPart.trace(functions.embed, shared, microbatch)
    head = SharedPart.trace(functions.head, shared, x, microbatch)
    head_split = head.split(shared, x, microbatch)
    plan = RingPlan.of(kind.split, None, [_EVERY], pairs=False)
    kind = replace(kind, rings=plan)
    rings = tuple(_filled(plan.empty()) for _ in layers)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.float32), {"shared": shared, "layers": layers}
    )
    inputs = jnp.stack([x] * _SLOTS)

    def chunk(given: Tree) -> Chunk:
        return Chunk(
            tuple(
                LayerSlot(kind, layer, jnp.int32(place), None, place)
                for place, layer in enumerate(given["layers"])
            )
        )

    def forward(state: Tree, given: Tree, row: Row) -> Tree:
        x, rings = state
        before = Made(x, tuple(plan.part(own, Op.F) for own in rings), Side(), None)
        made = chunk(given).forward(_of_microbatch(given, row), before)
        return made.y, made.rings

    def gradient(op: Op) -> Callable[..., Tree]:
        def run(state: Tree, given: Tree, row: Row) -> Tree:
            dy, rings, totals = state
            before = Gradients(dy, tuple(plan.part(own, op) for own in rings), totals)
            made = chunk(given).gradient(
                op, _of_microbatch(given, row), before,
                lambda ring, part: plan.read(plan.after(rings[ring], op, part), row, op),
            )  # fmt: skip
            after = (plan.after(own, op, part) for own, part in zip(rings, made.rings))
            return made.dx, tuple(after), made.totals

        return run

    def leave(state: Tree, given: Tree, row: Row) -> Tree:
        params, y = head.pick(given["shared"]), buffers.read(given["inputs"], row.for_b_read)
        context = Context(given["microbatch"])
        output, kept = head_split.forward(params, y, context)
        seed = Cotangent(jnp.ones_like(output.y))
        dy, used = head_split.backward(params, context, kept, seed)
        return output.y, dy.value, head.add(state[2], used)

    def enter(state: Tree, given: Tree, row: Row) -> Tree:
        tokens = jax.tree.map(lambda leaf: leaf.at[0, 0].set(row.for_b_read), given["microbatch"])
        return functions.embed(given["shared"], tokens)

    def enter_gradient(state: Tree, given: Tree, row: Row) -> Tree:
        dx = buffers.read(given["inputs"], row.for_b_read)
        return embed.add(state, embed.gradients(given["shared"], given["microbatch"], dx))

    given = {
        "layers": layers, "shared": shared, "microbatch": microbatch, "inputs": inputs
    }  # fmt: skip
    states = {
        "F": (forward, (x, rings)),
        "B": (gradient(Op.B), (x, rings, zeros["layers"])),
        "W": (gradient(Op.W), (x, rings, zeros["layers"])),
        "BW": (gradient(Op.BW), (x, rings, zeros["layers"])),
        "head": (leave, (jnp.float32(0), x, zeros["shared"])),
        "embed": (enter, x),
        "embed_gradient": (enter_gradient, zeros["shared"]),
    }
    return {
        name: (_repeated(run, turns), _copied(state), given)
        for name, (run, state) in states.items()
    }


def _of_microbatch(given: Tree, row: Row) -> Given:
    return Given(row, given["microbatch"], None, jnp.float32(1))


@jax.jit
def _copied(tree: Tree) -> Tree:
    """What a loop may overwrite."""
    return jax.tree.map(jnp.copy, tree)


def _filled(rings: Rings) -> Rings:
    return jax.tree.map(lambda ring: jnp.full_like(ring, 0.01), rings)


def _repeated(run: Callable[..., Tree], turns: int) -> Callable[..., Tree]:
    """`run` so often in a loop, each turn on another slot of the rings."""

    def loop(state: Tree, given: Tree) -> Tree:
        def turn(state: Tree, slot: jax.Array) -> tuple[Tree, None]:
            every = Row._make([slot] * len(Row._fields))  # the same slot in every ring
            return run(state, given, every), None

        return lax.scan(turn, state, jnp.arange(turns) % _SLOTS)[0]

    return loop


class TransferTimer:
    """Ticks that only exchange a message with each neighbour on the ring."""

    def __init__(self, trainer: Trainer, ticks: int = 30):
        mesh, train = trainer.mesh, trainer.config.train
        size = mesh.shape[PP]
        message = jax.ShapeDtypeStruct(
            (train.microbatch_size, train.seq_len, trainer.config.model.d_model),
            trainer.execution.compute_dtype,
        )

        def exchange(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Tree, None]:
            moved = tuple(
                lax.ppermute(load, PP, [(r, (r + hop) % size) for r in range(size)])
                for load, hop in zip(carry, (1, -1))
            )
            return lax.optimization_barrier(moved), None

        def run() -> jax.Array:
            rank = lax.axis_index(PP).astype(message.dtype)
            start = (jnp.full(message.shape, rank), jnp.full(message.shape, -rank))
            y, dx = lax.scan(exchange, start, None, length=ticks)[0]
            return (y + dx)[None]

        self._ticks = ticks
        self._run = jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=PartitionSpec(PP), check_vma=False)
        )
        self.seconds()

    def seconds(self) -> float:
        """Seconds of one tick's exchange."""
        begin = time.perf_counter()
        jax.block_until_ready(self._run())
        return (time.perf_counter() - begin) / self._ticks


class UpdateTimer:
    """The optimizer on what one rank has: so many layers, and its part of the two ends."""

    def __init__(self, trainer: Trainer, layers: int):
        ranks = trainer.mesh.shape[PP]
        key, kind = jax.random.key(0), trainer.layout.kinds[0]

        def start() -> State:
            held = [
                jax.tree.map(
                    lambda leaf: leaf[None],
                    trainer.model.init_layer(key, index, kind),
                )
                for index in range(layers)
            ]
            ends = jax.tree.map(
                lambda leaf: leaf[: len(leaf) // ranks], trainer.model.init_ends(key)
            )
            return trainer.unplaced({"shared": ends, "layers": tuple(held)})

        def update(state: State, gradients: Tree) -> State:
            return trainer.update(state, jnp.float32(0), gradients, Side())[0]

        self._state = jax.jit(start)()
        self._gradients = jax.tree.map(jnp.copy, self._state.params)
        self._run = jax.jit(update, donate_argnums=0)
        self.seconds()

    def seconds(self) -> float:
        """Seconds of one update."""
        begin = time.perf_counter()
        self._state = jax.block_until_ready(self._run(self._state, self._gradients))
        return time.perf_counter() - begin
