"""Checks of the states and parameters that a caller gives to a trainer's programs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.training.state import State

Tree = Any
_REMEDY = "make it by Trainer.init of this trainer, or restore it for this trainer"


def check_state(state: Any, like: State) -> None:
    """Raise `ConfigError` where a state is none of the trainer whose `state_shapes` are `like`.

    Structure, shapes and dtypes are compared, and of arrays outside of a trace whether they still
    exist, and how they are sharded.
    """
    if not isinstance(state, State):
        raise ConfigError(f"the state is a {type(state).__name__}: {_REMEDY}.")
    _check_like("state", state, like, exact=True)


def check_parameters(params: Tree, variables: Tree, like: State) -> None:
    """`check_state` of parameters and variables that a program reads, which may cast them."""
    _check_like("params", params, like.params)
    _check_like("variables", variables, like.variables)


def check_batch_shards(batch: Tree, sharding: jax.sharding.Sharding) -> None:
    """Raise `ConfigError` where an array of a batch is on devices, but not sharded like this."""
    for name, leaf in batch.items():
        if isinstance(leaf, jax.Array) and not _is_sharded(leaf, sharding):
            raise ConfigError(
                f"{name} of the batch is on {_names(leaf.sharding)}, and not as this trainer's "
                f"mesh shards it: put it on the devices by `put` of this trainer."
            )


def _check_like(name: str, tree: Tree, like: Tree, *, exact: bool = False) -> None:
    found, want = (dict(jax.tree_util.tree_leaves_with_path(of)) for of in (tree, like))
    if more := [path for path in (*want, *found) if (path in want) != (path in found)]:
        how = "lacks" if more[0] in want else "has"
        raise ConfigError(
            f"{name} {how} {name}{jax.tree_util.keystr(more[0])}, unlike that of this trainer's "
            f"model and mesh: {_REMEDY}."
        )
    for path, leaf in found.items():
        where, shape = name + jax.tree_util.keystr(path), want[path]
        if np.shape(leaf) != shape.shape:
            raise ConfigError(
                f"{where} is {list(np.shape(leaf))}, but {list(shape.shape)} in this trainer's "
                f"model and mesh: {_REMEDY}."
            )
        dtype = jax.dtypes.result_type(leaf)
        if exact and jnp.promote_types(dtype, shape.dtype) != dtype:  # wider ones are for proofs
            raise ConfigError(
                f"{where} is {dtype}, but a step keeps it in {shape.dtype}: cast it back; "
                f"train.compute_dtype is the dtype in which steps compute."
            )
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        if leaf.is_deleted():
            raise ConfigError(
                f"{where} is gone: a step overwrites the arrays of the state that it gets. Go on "
                f"from the state that the step returned, or copy the earlier one before the step "
                f"by jax.tree.map(jnp.copy, state)."
            )
        if leaf.committed and not _is_sharded(leaf, shape.sharding, exact=exact):
            raise ConfigError(
                f"{where} is on {_names(leaf.sharding)}, and not as this trainer's mesh shards it "
                f"over {_names(shape.sharding)}: {_REMEDY}."
            )


def _is_sharded(leaf: jax.Array, like: jax.sharding.Sharding, *, exact: bool = True) -> bool:
    """Whether an array is on the same devices, and if `exact` sharded alike."""
    if exact:
        return leaf.sharding.is_equivalent_to(like, leaf.ndim)
    return leaf.sharding.device_set == like.device_set


def _names(sharding: jax.sharding.Sharding) -> str:
    return ", ".join(sorted(map(str, sharding.device_set)))


@dataclass(frozen=True)
class CheckedProgram:
    """A compiled step that says in a sentence why jax refused its arguments; else `program`.

    Attributes:
      program: the result of `jax.jit`; every other attribute is its.
      check: raises `ConfigError` for a wrong state or batch.
    """

    program: Any
    check: Callable[[State, Tree], None]

    def __call__(self, state: State, batch: Tree) -> Any:
        """Run the program; nothing is checked before jax refuses."""
        try:
            return self.program(state, batch)
        except (RuntimeError, TypeError, ValueError) as error:
            failed = error
        if not isinstance(failed, ConfigError):
            self.check(state, batch)
        raise failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)
