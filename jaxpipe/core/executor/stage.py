"""Embedding and head as the executor runs them: each with gradients of what it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.core.contract import Context, LayerOutput, Tree
from jaxpipe.core.mesh.flags import merge, select
from jaxpipe.core.split.jaxpr import reads, trace_labelled, unrounded
from jaxpipe.core.split.ports import Weights
from jaxpipe.core.split.running import run_slice
from jaxpipe.core.split.split import LayerSplit, split_layer


@dataclass(frozen=True)
class EmbedHeadFunction:
    """Embedding or head, and a flag for every parameter that it reads and that is trained."""

    function: Callable[..., jax.Array]
    used: Tree

    @classmethod
    def trace(
        cls, function: Callable[..., jax.Array], trained: Tree, embed_head: Tree, *args: Any
    ) -> "EmbedHeadFunction":
        """Find the trained parameters that `function(embed_head, *args)` reads, by tracing it.

        `trained` has a flag for every parameter.
        """
        closed, (leaves, *_), _ = trace_labelled(function, embed_head, *args)
        read = set(reads(closed.jaxpr.eqns, closed.jaxpr.outvars))
        return cls(
            function, jax.tree.map(lambda flag, leaf: flag and leaf in read, trained, leaves)
        )

    def split(self, embed_head: Tree, x: Any, rows: Tree) -> LayerSplit:
        """Split `function` as a layer without parameters; its y is the loss."""

        def layer(params: None, x: jax.Array, context: Context) -> LayerOutput:
            return LayerOutput(self.function(context.embed_head, x, context.rows))

        context = Context(rows, embed_head=embed_head)
        return split_layer(layer, None, x, context, trained=Weights(None, self.used))

    def gradients(self, embed_head: Tree, rows: Tree, dx: jax.Array) -> Tree:
        """Return the gradients of the used leaves, given `dx` at `function(embed_head, rows)`.

        Gradients that are sums over tokens are float32, whatever the dtype of the leaf.
        """

        def backward(embed_head: Tree, rows: Tree, dx: jax.Array) -> Tree:
            def function(used: Tree) -> jax.Array:
                return self.function(merge(self.used, used, embed_head), rows)

            _, pull = jax.vjp(function, select(self.used, embed_head))
            return pull(dx)[0]

        arguments = embed_head, rows, dx
        closed, inputs, outputs = trace_labelled(backward, *arguments)
        closed, outputs = unrounded(closed, outputs)
        known = dict(zip(closed.jaxpr.constvars, closed.consts))
        known |= dict(zip(jax.tree.leaves(inputs), jax.tree.leaves(arguments)))
        return run_slice(closed.jaxpr, known, outputs)


def add_gradients(total: Tree, gradients: Tree) -> Tree:
    """Return `total` with gradients added in its dtype; None adds nothing."""

    def add(total: jax.Array, gradient: jax.Array | None) -> jax.Array:
        return total if gradient is None else total + gradient.astype(total.dtype)

    return jax.tree.map(add, total, gradients)
