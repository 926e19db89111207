"""Parameters that a run initialises anew instead of reading them from a checkpoint, by name.

A state in keyed form is a pytree of dicts and optimizer named tuples. A leaf's name is its path,
such as `params/layers/17/attn/wq`; the names of a parameter's moments contain the same path.
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
    """Parameters that a run does not read from a checkpoint, together with their moments.

    Attributes:
      patterns: fnmatch patterns of parameter names, such as `embed_head/head` or `layers/*/mlp/*`,
        in which `*` also matches `/`.
      init_state: returns a stage-stacked state that holds the values to use instead.
      if_absent: patterns of parameters that are initialised anew only if the checkpoint lacks them.
    """

    patterns: tuple[str, ...]
    init_state: Callable[[], Tree]
    if_absent: tuple[str, ...] = ()

    def absent_names(self, keyed: Tree, stored: Tree) -> frozenset[str]:
        """Names of the leaves of `if_absent` in a state in keyed form that `stored` lacks."""
        missing = leaves_by_name(keyed).keys() - leaves_by_name(stored).keys()
        patterns = [f"params/{pattern}" for pattern in self.if_absent]
        return frozenset(
            name for name in missing if any(fnmatch.fnmatch(name, one) for one in patterns)
        )

    def match_names(self, keyed: Tree) -> frozenset[str]:
        """Names of the excluded leaves of a state in keyed form.

        Raises `ConfigError` where a pattern matches no parameter.
        """
        names = list(leaves_by_name(keyed["params"]))
        paths: set[str] = set()
        for pattern in self.patterns:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise ConfigError(
                    f"checkpoint.exclude has {pattern!r}, but no parameter is named so: names are "
                    f"{', '.join(names[:4])}, ..., {names[-1]}; `*` stands for anything."
                )
            paths.update(f"/{name}/" for name in matching)
        return frozenset(
            name for name in leaves_by_name(keyed) if any(path in f"{name}/" for path in paths)
        )


def leaves_by_name(tree: Tree) -> dict[str, Any]:
    """The leaves of a state in keyed form by name; a leaf is an array or has its `shape`."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
    return {_name(path): leaf for path, leaf in leaves}


def replace_leaves(tree: Tree, names: Set[str], other: Callable[[Any], Any]) -> Tree:
    """A state in keyed form, or its shapes, with `other(name)` in place of each leaf in `names`.

    >>> params = {"embed_head": {"embed": 1, "head": 2}}
    >>> replace_leaves(params, {"embed_head/head"}, lambda name: name)
    {'embed_head': {'embed': 1, 'head': 'embed_head/head'}}
    """

    def leaf(path: Any, value: Any) -> Any:
        name = _name(path)
        return other(name) if name in names else value

    return jax.tree.map_with_path(leaf, tree, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "shape")


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
