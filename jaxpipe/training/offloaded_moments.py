"""Moments that stay in host memory between updates (`train.offload_moments`)."""

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import optax
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.mesh import map_stage_stacked, stage_stacked_trees

Tree = Any


def kept_on_host(shardings: Tree) -> Tree:
    """Shardings of an optimizer state with its moments in host memory."""
    return map_moments(lambda sharding: sharding.with_memory_kind(buffers.HOST), shardings)


def map_moments(change: Callable[[Any], Any], state: Tree) -> Tree:
    """Apply `change` to every leaf of the stage-stacked trees in `state`, not to counts.

    >>> state = {"mu": {"embed_head": 1, "layers": (2,)}, "count": 3}
    >>> map_moments(lambda leaf: -leaf, state)
    {'count': 3, 'mu': {'embed_head': -1, 'layers': (-2,)}}
    """
    return map_stage_stacked(lambda node: jax.tree.map(change, node), state)


def fetched(moments: Tree, after: Tree) -> tuple[Tree, Tree]:
    """Copy the moments to the device once `after` is computed; return them and `after`.

    Without the barrier XLA may start the copy before the step, and the moments would then use
    device memory throughout the step. The caller must read the returned `after`: XLA removes an
    operand of a barrier whose result is not used. Counts pass it by: XLA sees then that they are
    the same for every group of `update_in_turn`, and rounds as in an update of all at once.
    """
    held, after = lax.optimization_barrier((stage_stacked_trees(moments), after))
    copies = iter(buffers.to_device(held))
    return map_stage_stacked(lambda _: next(copies), moments), after


def update_in_turn(
    update: Callable[..., tuple[Tree, Tree]], gradients: Tree, moments: Tree, params: Tree,
    updates: jax.Array,
) -> tuple[Tree, Tree]:  # fmt: skip
    """Update parameters, and moments in host memory, one group of parameters after the other.

    The moments of a group are copied to the device once `updates` is computed and those of the
    group before it have returned. XLA would copy all of them at once, and they would need as much
    device memory as if they had never left.

    Args:
      update: takes gradients, moments, parameters and `updates`, a bool array, and returns new
        parameters and moments (`optimizer.apply`). It must treat every parameter by itself.
    """
    changed: list[Tree] = []
    done: list[Tree] = []
    for group in _groups(params):
        held = _of_group(group, moments)
        if done:
            held, done[-1] = fetched(held, done[-1])
        else:
            held, updates = fetched(held, updates)
        of_group = _of_group(group, gradients), held, _of_group(group, params)
        leaves, held = update(*of_group, updates)
        changed.append(leaves)
        done.append(returned(held))
    return _union(changed, params), _union(done, moments)


def returned(moments: Tree) -> Tree:
    """Copy the moments to host memory.

    `out_shardings` alone are not enough: XLA then leaves the moments on the device.
    """
    return map_moments(buffers.to_host, moments)


def _groups(params: Tree) -> list[set[Any]]:
    """Paths of consecutive parameters, which together are no larger than the largest one."""
    sizes = [(path, leaf.size) for path, leaf in jax.tree.leaves_with_path(params)]
    most = total = max(size for _, size in sizes)
    groups: list[set[Any]] = []
    for path, size in sizes:
        total += size
        if total > most:
            groups.append(set())
            total = size
        groups[-1].add(path)
    return groups


def _of_group(paths: Set[Any], tree: Tree) -> Tree:
    """The tree with what belongs to parameters at these paths, and with state that belongs to none.

    An optimizer may keep several arrays of a parameter, or only a mark that it has none.
    """

    def belongs(path: tuple[Any, ...]) -> bool:
        return any(path[:end] in paths for end in range(1, len(path) + 1))

    def of_stages(node: Tree) -> Tree:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if belongs(path) else None,
            node, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )  # fmt: skip

    return map_stage_stacked(of_stages, tree)


def _union(groups: Sequence[Tree], like: Tree) -> Tree:
    """The tree with the structure of `like`, whose leaves the groups' trees have between them."""
    leaves = {path: leaf for tree in groups for path, leaf in jax.tree.leaves_with_path(tree)}
    return jax.tree.map_with_path(lambda path, _: leaves[path], like)
