"""The weights of a running model in Hugging Face's names, for an inference server."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.checkpoint.hf.adapters import merging
from jaxpipe.checkpoint.hf.naming import VARIABLES, list_parameters
from jaxpipe.checkpoint.hf.parameters import convert_tensors
from jaxpipe.checkpoint.hf.placing import Read
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP, ParamSharding
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
ParamPath = tuple[str, ...]


def stream_weights(trainer: Trainer, state: State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, full array) of every parameter, in the order of an export.

    One pipeline rank sends at a time: a layer's owner broadcasts it to all devices, tensor by
    tensor, so that every process of a run gets all arrays. All processes must iterate to the end,
    and no step may run in between. Memory holds one layer on the host, and one parameter besides
    the state on a device. The parameters are those that a held-out loss evaluates.

    Raises `ConfigError` where the model's family has no form at Hugging Face.
    """
    params = trainer.averaged(state)
    shardings = trainer.sharding.param_shardings(params)

    def read(paths: Sequence[ParamPath]) -> list[np.ndarray]:
        if paths[0][0] == VARIABLES:  # replicated
            return [np.asarray(state.variables[name]) for _, name in paths]
        return [np.asarray(_broadcast(trainer, params, shardings, path)) for path in paths]

    lora = trainer.config.lora
    every: Read = read
    if lora.rank:
        every = merging(read, partial(_has, trainer, params), lora.alpha / lora.rank)
    yield from convert_tensors(every, list_parameters(trainer.config.model))


def _has(trainer: Trainer, params: Tree, path: ParamPath) -> bool:
    """Whether there is a parameter at a path."""
    if path[0] == "layers":
        run, _ = trainer.layout.place_of(int(path[1]))
        params, path = params["layers"][run], path[2:]
    for key in path:
        params = params.get(key, {}) if isinstance(params, dict) else {}
    return not isinstance(params, dict)


def _broadcast(trainer: Trainer, params: Tree, shardings: Tree, path: ParamPath) -> jax.Array:
    """The full array of a parameter by its path on disk, on every device."""
    index: tuple[int, ...] = ()
    if path[0] == "layers":
        run, index = trainer.layout.place_of(int(path[1]))
        params, shardings = params["layers"][run], shardings["layers"][run]
        path = path[2:]
    for key in path:
        params, shardings = params[key], shardings[key]
    return _program(trainer.mesh, shardings, len(index))(params, *map(jnp.int32, index))


@cache
def _program(mesh: Mesh, stored: ParamSharding, indices: int) -> Any:
    """Compiled `(leaf, *index) -> full array`, of the layer at an index (`place_of`) of its run."""

    def gather(leaf: jax.Array, *index: jax.Array) -> jax.Array:
        if not index:
            return stored.gather(leaf, {PP, TP, *REPLICA_AXES})
        (rank, *row), how, own = index, stored.without_leading_axis, leaf[0]
        if row:
            how, own = how.without_leading_axis, own[row[0]]
        full = how.gather(own, {TP, *REPLICA_AXES})
        return lax.psum(jnp.where(lax.axis_index(PP) == rank, full, 0), PP)

    return jax.jit(
        jax.shard_map(
            gather,
            mesh=mesh,
            in_specs=(stored.partition_spec, *[PartitionSpec()] * indices),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
