"""Times of what a step does besides its ops: messages between ranks, and the update."""

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from msgspec import structs

from jaxpipe.core.contract import Aux
from jaxpipe.core.mesh import PP
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.model.family import INT32_MAX
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
_TICKS = 30  # exchanges of a message that are timed together


class TransferTimer:
    """Times ticks that only exchange a message with each neighbouring pipeline rank."""

    def __init__(self, trainer: Trainer):
        mesh, config = trainer.mesh, trainer.config
        size, dtype = mesh.shape[PP], jnp.dtype(config.train.compute_dtype)
        message = jax.ShapeDtypeStruct((costs_of(config).message // dtype.itemsize,), dtype)

        def exchange(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Tree, None]:
            moved = tuple(
                lax.ppermute(load, PP, [(r, (r + hop) % size) for r in range(size)])
                for load, hop in zip(carry, (1, -1))
            )
            return lax.optimization_barrier(moved), None

        def run() -> jax.Array:
            rank = lax.axis_index(PP).astype(message.dtype)
            start = (jnp.full(message.shape, rank), jnp.full(message.shape, -rank))
            y, dx = lax.scan(exchange, start, None, length=_TICKS)[0]
            return (y + dx)[None]

        self._run = jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=PartitionSpec(PP), check_vma=False)
        )
        self.seconds()

    def seconds(self) -> float:
        """Time of one tick's exchange [s]."""
        begin = time.perf_counter()
        jax.block_until_ready(self._run())
        return (time.perf_counter() - begin) / _TICKS


def _zero_aux(trainer: Trainer) -> Aux:
    """Zeros in the shapes of a step's auxiliary outputs; empty if the update does not read them."""
    functions = trainer.model.functions
    if functions.next_variables is None and functions.report is None:
        return Aux()
    state, batch = trainer.state_shapes, trainer.sharder.shapes(trainer.config.train.seq_len)
    aux = jax.eval_shape(trainer.pipeline.step, state.params, batch, state.variables).aux
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), aux)


def _unrolled(trainer: Trainer) -> Trainer:
    """Return the trainer with every layer a run of its own."""
    config = trainer.config
    parallel = structs.replace(config.parallel, unroll_layers=INT32_MAX)
    plan = replace(trainer.plan, config=structs.replace(config, parallel=parallel))
    return replace(trainer, plan=plan)


class UpdateTimer:
    """Times the optimizer on layers of a pipeline rank and its shard of embedding and head.

    Attributes:
        layers: how many: those of the first `most` layer slots.
        share_of_layers: share of the updated values that belong to layers.
    """

    def __init__(self, trainer: Trainer, most: int):
        trainer = _unrolled(trainer)
        ranks = trainer.mesh.shape[PP]
        key, kinds = jax.random.key(0), trainer.layout.slot_kinds[:most]
        self.layers = len(kinds)

        def start() -> State:
            own_layers = [
                jax.tree.map(lambda leaf: leaf[None], trainer.model.init_layer(key, index, kind))
                for index, kind in enumerate(kinds)
            ]
            embed_head = jax.tree.map(
                lambda leaf: leaf[: len(leaf) // ranks], trainer.model.init_embed_head(key)
            )
            return trainer.unplaced({"embed_head": embed_head, "layers": tuple(own_layers)})

        aux = _zero_aux(trainer)

        def update(state: State, gradients: Tree) -> State:
            return trainer.update(state, jnp.float32(0), gradients, aux)[0]

        self._state = jax.jit(start)()
        params = self._state.params
        sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(params[name])) for name in params}
        self.share_of_layers = sizes["layers"] / sum(sizes.values())
        trained = is_trained(trainer.sharding.param_shardings(params))
        self._gradients = jax.tree.map(jnp.copy, select(trained, params))
        self._run = jax.jit(update, donate_argnums=0)
        self.seconds()

    def seconds(self) -> float:
        """Time of one update [s]."""
        begin = time.perf_counter()
        self._state = jax.block_until_ready(self._run(self._state, self._gradients))
        return time.perf_counter() - begin
