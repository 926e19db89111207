"""Moments that wait in the host's memory from update to update (`train.offload_moments`)."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxpipe.parallel import is_stage_form
from jaxpipe.pipeline import buffers

Tree = Any
HOST = "pinned_host"


def kept_on_host(shardings: Tree) -> Tree:
    """Shardings of an optimizer's state, those of its moments in the host's memory."""
    return _of_moments(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def fetched(moments: Tree, after: jax.Array) -> tuple[Tree, jax.Array]:
    """The state on the device, copied once `after` is there; and `after`, to be read from now on.

    Else XLA may begin the copy before the step, which it would then lie beside: of what passes a
    barrier it leaves out what nobody reads behind it.
    """
    moments, after = lax.optimization_barrier((moments, after))
    return _of_moments(buffers.to_device, moments), after


def returned(moments: Tree) -> Tree:
    """The state with its moments in the host's memory.

    Shardings of what a function returns are not enough: XLA then leaves all of it on the device.
    """
    return _of_moments(buffers.to_host, moments)


def _of_moments(change: Callable[[Any], Any], state: Tree) -> Tree:
    """A tree with every leaf of its trees in stage form changed: not, say, the number of updates.

    >>> state = {"mu": {"shared": 1, "layers": (2,)}, "count": 3}
    >>> _of_moments(lambda leaf: -leaf, state)
    {'count': 3, 'mu': {'layers': (-2,), 'shared': -1}}
    """

    def of(node: Tree) -> Tree:
        return jax.tree.map(change, node) if is_stage_form(node) else node

    return jax.tree.map(of, state, is_leaf=is_stage_form)
