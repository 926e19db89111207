"""Functions of a model with a fault in each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.config import Config
from jaxpipe.core.contract import Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP

Tree = Any
ChangeInputs = Callable[[Tree, Context], tuple[Tree, Context]]


def divide_losses(functions: StageFunctions, config: Config) -> StageFunctions:
    """Losses are divided by M, though their terms are counted already."""
    count = config.train.grad_accum_steps
    return replace(functions, head=lambda *arguments: functions.head(*arguments) / count)


def count_ignored(functions: StageFunctions, config: Config) -> StageFunctions:
    """All targets count as terms of the loss."""
    return replace(functions, count=lambda rows: jnp.int32(rows["targets"].size))


def stop_head(functions: StageFunctions, config: Config) -> StageFunctions:
    """The head, which may be the embedding, gets no gradient."""
    head = functions.head
    return replace(
        functions, head=lambda embed_head, *rest: head(lax.stop_gradient(embed_head), *rest)
    )


def stop_embedding(functions: StageFunctions, config: Config) -> StageFunctions:
    """The embedding gets no gradient but as the head."""
    embed = functions.embed
    return replace(
        functions, embed=lambda embed_head, rows: embed(lax.stop_gradient(embed_head), rows)
    )


def drop_replica(functions: StageFunctions, config: Config) -> StageFunctions:
    """Gradients of layers lack those of the first replica."""

    def change(params: Tree, context: Context) -> tuple[Tree, Context]:
        return _scale_gradient(params, lax.axis_index(REPLICA_AXES) > 0), context

    return _with_inputs(functions, change)


def scale_experts(functions: StageFunctions, config: Config) -> StageFunctions:
    """Gradients of experts count once per replica that shares them."""
    return _scaled(functions, "experts", config.parallel.ep)


def stop_router(functions: StageFunctions, config: Config) -> StageFunctions:
    """The router gets no gradient."""
    return _scaled(functions, "router", 0)


def forget_slices(functions: StageFunctions, config: Config) -> StageFunctions:
    """Every slice reads zeros in the place of earlier slices' keys."""

    def change(params: Tree, context: Context) -> tuple[Tree, Context]:
        return params, context._replace(state=jax.tree.map(jnp.zeros_like, context.state))

    return _with_inputs(functions, change)


def has_embed_head_over_pp(trainer: Any) -> bool:
    """Whether stages add their own gradients of embedding and head."""
    specs = jax.tree.leaves(trainer.model.functions.embed_head_specs)
    return trainer.config.parallel.pp > 1 and any(PP in spec.partial_grad_axes for spec in specs)


def keep_embed_head_partial(functions: StageFunctions, config: Config) -> StageFunctions:
    """Gradients of embedding and head are not summed over pp."""
    return replace(functions, embed_head_specs=_without(PP, functions.embed_head_specs))


def keep_norms_partial(functions: StageFunctions, config: Config) -> StageFunctions:
    """Gradients of parameters that each device applies to its tokens are not summed over tp."""
    kinds = {
        name: replace(kind, param_specs=_without(TP, kind.param_specs))
        for name, kind in functions.kinds_by_name.items()
    }
    return replace(functions, kinds=kinds)


def _without(axis: str, specs: Tree) -> Tree:
    def change(spec: ParamSpec) -> ParamSpec:
        rest = tuple(name for name in spec.partial_grad_axes if name != axis)
        return replace(spec, partial_grad_axes=rest)

    return jax.tree.map(change, specs)


def _scaled(functions: StageFunctions, part: str, factor: float) -> StageFunctions:
    """Scale the gradients of parameters below a name."""

    def change(params: Tree, context: Context) -> tuple[Tree, Context]:
        def scale(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            is_part = any(key.key == part for key in path)
            return _scale_gradient(leaf, factor) if is_part else leaf

        return jax.tree.map_with_path(scale, params), context

    return _with_inputs(functions, change)


def _scale_gradient(tree: Tree, factor: Any) -> Tree:
    """The same values, with gradients multiplied by a factor."""

    def scale(leaf: jax.Array) -> jax.Array:
        fixed = lax.stop_gradient(leaf)
        return fixed + jnp.asarray(factor, leaf.dtype) * (leaf - fixed)

    return jax.tree.map(scale, tree)


def _with_inputs(functions: StageFunctions, change: ChangeInputs) -> StageFunctions:
    """The same functions, whose layers get other parameters and another context."""

    def changed(kind: LayerKind) -> LayerKind:
        def layer(params: Tree, x: jax.Array, context: Context) -> LayerOutput:
            params, context = change(params, context)
            return kind.layer(params, x, context)

        return replace(kind, layer=layer)

    kinds = {name: changed(kind) for name, kind in functions.kinds_by_name.items()}
    return replace(functions, kinds=kinds)
