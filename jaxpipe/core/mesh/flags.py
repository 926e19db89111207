"""Trees of flags, which divide the leaves of a tree in two: trained parameters and frozen ones.

`select` puts None in the place of the other leaves. A None is no leaf, so gradients, optimizer
state and checkpoints of a selected tree have no arrays there.
"""

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import Tree


def is_trained(params: Tree) -> Tree:
    """Whether each parameter has a gradient, from its `ParamSpec` or `ParamSharding`."""
    return jax.tree.map(lambda param: param.trained, params)


def select(flags: Tree, tree: Tree) -> Tree:
    """The leaves of `tree` whose flag is set; None in the place of all others.

    >>> select({"a": True, "b": False}, {"a": 1, "b": 2})
    {'a': 1, 'b': None}
    """
    return jax.tree.map(lambda flag, leaf: leaf if flag else None, flags, tree)


def choose(flag: jax.Array, new: Tree, old: Tree) -> Tree:
    """The tree `new` if the scalar `flag` is true on the device, otherwise `old`."""
    return jax.tree.map(lambda new, old: jnp.where(flag, new, old), new, old)


def merge(flags: Tree, chosen: Tree, others: Tree) -> Tree:
    """The leaves of `chosen` where the flag is set, elsewhere those of `others`.

    >>> merge({"a": True, "b": False}, {"a": 3, "b": None}, {"a": 1, "b": 2})
    {'a': 3, 'b': 2}
    """
    return jax.tree.map(lambda flag, one, other: one if flag else other, flags, chosen, others)
