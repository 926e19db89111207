"""Embedding and head as the executor runs them: each with gradients of what it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import Context, LayerOutput
from jaxpipe.core.mesh.flags import merge, select
from jaxpipe.core.split.jaxpr import reads, run_slice, trace_labelled, unrounded
from jaxpipe.core.split.ports import Weights
from jaxpipe.core.split.split import LayerSplit, split_layer

Tree = Any


@dataclass(frozen=True)
class EmbedHeadFunction:
    """Embedding or head, and a flag for every parameter that it reads and that is trained."""

    function: Callable[..., jax.Array]
    used: Tree

    @classmethod
    def trace(
        cls, function: Callable[..., jax.Array], trained: Tree, shared: Tree, *args: Any
    ) -> "EmbedHeadFunction":
        """Find the trained leaves of `shared` that `function(shared, *args)` reads, by tracing it.

        `trained` has a flag for every leaf.
        """
        closed, (leaves, *_), _ = trace_labelled(function, shared, *args)
        read = set(reads(closed.jaxpr.eqns, closed.jaxpr.outvars))
        return cls(
            function, jax.tree.map(lambda flag, leaf: flag and leaf in read, trained, leaves)
        )

    def split(self, shared: Tree, x: Any, rows: Tree) -> LayerSplit:
        """Split `function` as a layer without parameters that reads `shared`; the loss is its y."""

        def layer(params: None, x: jax.Array, context: Context) -> LayerOutput:
            return LayerOutput(self.function(context.embed_head, x, context.rows))

        context = Context(rows, embed_head=shared)
        return split_layer(layer, None, x, context, trained=Weights(None, self.used))

    def gradients(self, shared: Tree, rows: Tree, dx: jax.Array) -> Tree:
        """Return the gradients of the used leaves, given `dx` at `function(shared, rows)`.

        Gradients that are sums over tokens are float32, whatever the dtype of the leaf.
        """

        def pulled(shared: Tree, rows: Tree, dx: jax.Array) -> Tree:
            function = lambda own: self.function(merge(self.used, own, shared), rows)  # noqa: E731
            _, pull = jax.vjp(function, select(self.used, shared))
            return pull(dx)[0]

        arguments = shared, rows, dx
        closed, inputs, outputs = trace_labelled(pulled, *arguments)
        closed, outputs = unrounded(closed, outputs)
        known = dict(zip(closed.jaxpr.constvars, closed.consts))
        known |= dict(zip(jax.tree.leaves(inputs), jax.tree.leaves(arguments)))
        return run_slice(closed.jaxpr, known, outputs)

    def reset(self, total: Tree, is_reset: jax.Array) -> Tree:
        """Return `total` with zeros for the used leaves where the flag `is_reset` is set."""
        own = jax.tree.map(lambda leaf: jnp.where(is_reset, 0, leaf), select(self.used, total))
        return merge(self.used, own, total)

    def unused(self, total: Tree) -> Tree:
        """Return `total` without the used leaves."""
        return jax.tree.map(lambda used, leaf: None if used else leaf, self.used, total)


def add_gradients(total: Tree, gradients: Tree) -> Tree:
    """Return `total` with gradients added in its dtype; None adds nothing."""

    def add(total: jax.Array, gradient: jax.Array | None) -> jax.Array:
        return total if gradient is None else total + gradient.astype(total.dtype)

    return jax.tree.map(add, total, gradients)
