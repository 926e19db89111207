"""Parameters that a run does not take from a checkpoint: leaves of a keyed state, by their names.

A keyed state is nested dicts; `params/layers/17/attn/wq` names a leaf of its parameters.
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
    """Parameters with other values than a checkpoint's.

    Attributes:
      patterns: of their names, `ends/head` or `layers/*/mlp/*`, where `*` stands for anything.
      fresh: makes a state in stage form that has their values, and nothing but parameters.
    """

    patterns: tuple[str, ...]
    fresh: Callable[[], Tree]

    def names(self, keyed: Tree) -> frozenset[str]:
        """Those of the leaves; `ConfigError` where a pattern matches none."""
        every = [name.removeprefix("params/") for name in leaves_by_name(keyed)]
        found: set[str] = set()
        for pattern in self.patterns:
            matching = fnmatch.filter(every, pattern)
            if not matching:
                raise ConfigError(
                    f"checkpoint.exclude has {pattern!r}, but no parameter is named so: names are "
                    f"{', '.join(every[:4])}, ..., {every[-1]}; `*` stands for anything."
                )
            found.update(f"params/{name}" for name in matching)
        return frozenset(found)


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """The leaves of a keyed state, of arrays or of what describes them."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {"/".join(map(_key, path)): leaf for path, leaf in leaves}


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))


def without(tree: Tree, names: Set[str], place: str = "") -> Tree:
    """A keyed state without the leaves of these names, and without what then has none.

    >>> without({"ends": {"embed": 1, "head": 2}, "layers": {"0": {"up": 3}}}, {"layers/0/up"})
    {'ends': {'embed': 1, 'head': 2}}
    """
    if not names or not isinstance(tree, dict):
        return tree
    kept = {
        key: without(part, names, f"{place}{key}/")
        for key, part in tree.items()
        if f"{place}{key}" not in names
    }
    return {key: part for key, part in kept.items() if not isinstance(part, dict) or part}


def completed(tree: Tree, whole: Tree) -> Tree:
    """A keyed state with the leaves that it lacks from another, which lacks none.

    >>> completed({"ends": {"embed": 1}}, {"ends": {"embed": 8, "head": 9}})
    {'ends': {'embed': 1, 'head': 9}}
    """
    if not isinstance(whole, dict):
        return tree
    return {key: completed(tree[key], part) if key in tree else part for key, part in whole.items()}
