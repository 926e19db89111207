"""Embedding and head as the executor runs them: with only the parameters that each reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.contract import Context, LayerOutput
from jaxpipe.pipeline.jaxpr import reads, run_slice, trace_flat, unrounded
from jaxpipe.pipeline.split import LayerSplit, split_layer

Tree = Any


@dataclass(frozen=True)
class EmbedHeadFunction:
    """Embedding or head, and the indices of the `embed_head` leaves that it reads (`used`)."""

    function: Callable[..., jax.Array]
    used: tuple[int, ...]

    @classmethod
    def trace(
        cls, function: Callable[..., jax.Array], shared: Tree, *args: Any
    ) -> "EmbedHeadFunction":
        """Find the leaves of `shared` that `function(shared, *args)` reads, by tracing it."""
        jaxpr = trace_flat(function, shared, *args).jaxpr
        read = set(reads(jaxpr.eqns, jaxpr.outvars))
        count = len(jax.tree.leaves(shared))
        return cls(function, tuple(i for i in range(count) if jaxpr.invars[i] in read))

    def pick(self, shared: Tree) -> list[jax.Array]:
        """Return the used leaves."""
        leaves = jax.tree.leaves(shared)
        return [leaves[index] for index in self.used]

    def split(self, shared: Tree, x: Any, rows: Tree) -> LayerSplit:
        """Split `function` as a layer: the used leaves are its parameters, the loss is its y."""

        def of_used(used: list[jax.Array], x: jax.Array, context: Context) -> LayerOutput:
            return LayerOutput(self.function(self._put(shared, used), x, context.rows))

        return split_layer(of_used, self.pick(shared), x, Context(rows))

    def gradients(self, shared: Tree, rows: Tree, dx: jax.Array) -> list[jax.Array]:
        """Return the gradients of the used leaves, given `dx` at `function(shared, rows)`.

        Gradients that are sums over tokens are float32, whatever the dtype of the leaf.
        """

        def pulled(used: list[jax.Array], rows: Tree, dx: jax.Array) -> list[jax.Array]:
            _, pull = jax.vjp(lambda used: self.function(self._put(shared, used), rows), used)
            return pull(dx)[0]

        given = self.pick(shared), rows, dx
        closed = trace_flat(pulled, *given)
        known = dict(zip(closed.jaxpr.constvars, closed.consts))
        known |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(given)))
        return run_slice(closed.jaxpr, known, unrounded(closed.jaxpr, closed.jaxpr.outvars))

    def _put(self, shared: Tree, used: list[jax.Array]) -> Tree:
        leaves, structure = jax.tree.flatten(shared)
        for index, leaf in zip(self.used, used):
            leaves[index] = leaf
        return jax.tree.unflatten(structure, leaves)

    def reset(self, total: Tree, anew: jax.Array) -> Tree:
        """Return `total` with zeros for the used leaves where the flag `anew` is set."""
        own = [jnp.where(anew, 0, leaf) for leaf in self.pick(total)]
        return self._put(total, own)

    def unused(self, shared: Tree) -> list[jax.Array]:
        """Return the leaves that are not used."""
        return [leaf for i, leaf in enumerate(jax.tree.leaves(shared)) if i not in self.used]

    def with_unused(self, shared: Tree, others: list[jax.Array]) -> Tree:
        """Return `shared` with `others` in place of the leaves that are not used."""
        every, structure = iter(others), jax.tree.structure(shared)
        leaves = enumerate(jax.tree.leaves(shared))
        new = [leaf if i in self.used else next(every) for i, leaf in leaves]
        return jax.tree.unflatten(structure, new)

    def add(self, total: Tree, gradients: list[jax.Array | None]) -> Tree:
        """Return `total` with the gradients of the used leaves added, in the dtype of `total`."""
        leaves, structure = jax.tree.flatten(total)
        for index, gradient in zip(self.used, gradients):
            if gradient is not None:
                leaves[index] += gradient.astype(leaves[index].dtype)
        return jax.tree.unflatten(structure, leaves)
