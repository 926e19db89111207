"""Optimizers that need full matrices, applied to one layer at a time whatever the mesh.

On a stage-stacked tree `[P, ...]` such an optimizer would take the pipeline ranks for a dim of the
matrix, and padding for values. `layerwise` shows it every layer's full parameters without padding.
Arrays of its state that have a parameter's shape are padded and stored like the parameter, all
others as `Sharding` says. XLA gathers what the optimizer reduces over sharded dims.
"""

import re
from collections.abc import Callable, Set
from typing import Any

import jax
import optax
from jax import lax

from jaxpipe.config import ConfigError, first_line
from jaxpipe.core.jax_internals import used_inputs
from jaxpipe.core.mesh import is_stage_stacked, map_stage_stacked, stage_stacked_trees
from jaxpipe.optimizer.groups import Stores

Tree = Any
Name = tuple[str, ...] | None  # the path of a parameter; None: an array that belongs to none
_RANDOM = re.compile(r"\b(random_bits|threefry2x32|rng_bit_generator)\b")  # in a printed jaxpr


def layerwise(inner: optax.GradientTransformation, stored: Stores) -> optax.GradientTransformation:
    """`inner` on stage-stacked trees, with the result of `inner` on the layers themselves.

    `inner` must treat every parameter by itself (`check_independent`). In its tree
    `{"embed_head": tree, "layers": slots}` a layer stands at its slot on the pipeline rank, which
    depends on the mesh, so `inner` may distinguish parameters by name but not layers by index.
    """

    def init(params: Tree) -> Tree:
        return padded(_on_each_rank(inner.init, unpadded(params)))

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return padded(_on_each_rank(inner.update, *unpadded((updates, state, params))))

    def padded(tree: Tree) -> Tree:
        return map_stage_stacked(
            lambda node: jax.tree.map(lambda leaf, how: how.pad(leaf), node, stored(node)), tree
        )

    def unpadded(tree: Tree) -> Tree:
        def of(node: Tree) -> Tree:
            return jax.tree.map(
                lambda leaf, how: lax.slice(
                    leaf, (0,) * leaf.ndim, how.unpadded_shape(leaf.shape)
                ),
                node, stored(node),
            )  # fmt: skip

        return map_stage_stacked(of, tree)

    return optax.GradientTransformation(init, update)


def _on_each_rank(function: Callable[..., Tree], *trees: Tree) -> Tree:
    """Map `function` over the stage dim of the layers; all other arrays are computed once."""

    def of_rank(node: Tree) -> Tree:
        one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
        return node | {"layers": jax.tree.map(one, node["layers"])}

    result = jax.eval_shape(function, *map_stage_stacked(of_rank, trees))
    layers = jax.tree.leaves([node["layers"] for node in stage_stacked_trees(trees)])
    ranks = layers[0].shape[0] if layers else 1  # none, if only embedding or head are trained
    return jax.vmap(function, _mapped_axes(trees), _mapped_axes(result), axis_size=ranks)(*trees)


def _mapped_axes(tree: Tree) -> Tree:
    """A prefix of `tree` for `vmap`: dim 0 of the layers in stage-stacked trees, nothing else."""
    return map_stage_stacked(lambda _: {"embed_head": None, "layers": 0}, tree, lambda _: None)


def check_independent(name: str, inner: optax.GradientTransformation, params: Tree) -> None:
    """Raise `ConfigError` unless `inner` treats every parameter by itself.

    An update and a state that belong to a parameter must depend on that parameter, its gradient
    and its state alone, and state that belongs to no parameter, such as a count, on none: other
    parameters are on other devices. It draws no random numbers: layers of a slot would draw the
    same ones.

    Args:
      name: the optimizer's name, for the error.
      inner: the optimizer.
      params: shapes of embedding and head and of one layer of each kind, without a stage dim.
    """
    known = {_name(path) for path, _ in jax.tree.leaves_with_path(params)}

    def traced(function: Callable[..., Tree], *arguments: Tree) -> Tree:
        try:
            jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
        except Exception as error:  # whatever the user's function raises
            raise ConfigError(
                f"optimizer.name={name!r} fails on the parameters of this model "
                f"({type(error).__name__}: {first_line(error)}): an optimizer has init(params) and "
                f"update(gradients, state, params)."
            ) from error
        if drawn := _RANDOM.search(str(jaxpr)):
            raise ConfigError(
                f"optimizer.name={name!r} draws random numbers ({drawn[0]}), and layers on "
                f"different pipeline ranks would draw the same ones: use an optimizer without."
            )
        inputs, outputs = _owners(arguments, known), _owners(result, known)
        for owner in dict.fromkeys(outputs):
            used = used_inputs(jaxpr, [other == owner for other in outputs])
            read = {other for other, reads in zip(inputs, used) if reads and other} - {owner}
            if read:
                what = "/".join(owner) if owner else "a state that belongs to no parameter"
                raise ConfigError(
                    f"optimizer.name={name!r} computes {what} from {'/'.join(min(read))}, but "
                    f"parameters are on different devices and must be updated one by one: leave "
                    f"norms over several parameters out, and clip with optimizer.clip_norm."
                )
        return result

    traced(inner.update, params, traced(inner.init, params), params)


def _owners(tree: Tree, known: Set[Name]) -> list[Name]:
    """The parameter to which each leaf belongs."""
    owners: list[Name] = []
    for node in jax.tree.leaves(tree, is_leaf=is_stage_stacked):
        paths = [_name(path) for path, _ in jax.tree.leaves_with_path(node)]
        owners += [
            next((path[:end] for end in range(1, len(path) + 1) if path[:end] in known), None)
            for path in paths
        ]
    return owners


def _name(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys of a path as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
