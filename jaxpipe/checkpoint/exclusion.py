"""Parameters that a run does not take from a checkpoint: leaves of a keyed state, by their names.

A keyed state is a tree of dicts and of an optimizer's records; `params/layers/17/attn/wq` names a
leaf of its parameters, and its moments' names end alike.
"""

import fnmatch
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.config import ConfigError

Tree = Any


@dataclass(frozen=True)
class Exclusion:
    """Parameters, and moments of theirs, with other values than a checkpoint's.

    Attributes:
      patterns: of the parameters' names, `ends/head` or `layers/*/mlp/*`, where `*` stands for
        anything.
      fresh: makes a state in stage form that has their values.
    """

    patterns: tuple[str, ...]
    fresh: Callable[[], Tree]

    def names(self, keyed: Tree) -> frozenset[str]:
        """Those of the leaves; `ConfigError` where a pattern matches no parameter."""
        every = list(leaves_by_name(keyed["params"]))
        ends: set[str] = set()
        for pattern in self.patterns:
            matching = fnmatch.filter(every, pattern)
            if not matching:
                raise ConfigError(
                    f"checkpoint.exclude has {pattern!r}, but no parameter is named so: names are "
                    f"{', '.join(every[:4])}, ..., {every[-1]}; `*` stands for anything."
                )
            ends.update(f"/{name}" for name in matching)
        return frozenset(name for name in leaves_by_name(keyed) if name.endswith(tuple(ends)))


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """The leaves of a keyed state, of arrays or of what describes them."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
    return {_name(path): leaf for path, leaf in leaves}


def replaced(tree: Tree, names: Set[str], other: Callable[[Any], Any]) -> Tree:
    """A keyed state, or its shapes, with `other` of the leaves of these names.

    >>> params = {"ends": {"embed": 1, "head": 2}}
    >>> replaced(params, {"ends/head"}, lambda name: name)
    {'ends': {'embed': 1, 'head': 'ends/head'}}
    """

    def leaf(path: Any, kept: Any) -> Any:
        name = _name(path)
        return other(name) if name in names else kept

    return jax.tree.map_with_path(leaf, tree, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "shape")


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
