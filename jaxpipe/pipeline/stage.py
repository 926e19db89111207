"""The ends of a model as the executor runs them: with the shared leaves that they really read."""

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
class SharedPart:
    """One end of the model (embedding or head) and the shared leaves that it really reads."""

    function: Callable[..., jax.Array]
    used: tuple[int, ...]

    @classmethod
    def trace(cls, function: Callable[..., jax.Array], shared: Tree, *args: Any) -> "SharedPart":
        """Find the leaves of `shared` that `function(shared, *args)` reads."""
        jaxpr = trace_flat(function, shared, *args).jaxpr
        read = set(reads(jaxpr.eqns, jaxpr.outvars))
        count = len(jax.tree.leaves(shared))
        return cls(function, tuple(i for i in range(count) if jaxpr.invars[i] in read))

    def pick(self, shared: Tree) -> list[jax.Array]:
        """The used leaves."""
        leaves = jax.tree.leaves(shared)
        return [leaves[index] for index in self.used]

    def split(self, shared: Tree, x: Any, rows: Tree) -> LayerSplit:
        """`function` cut like a layer whose parameters are the used leaves, and y the loss."""

        def of_used(used: list[jax.Array], x: jax.Array, context: Context) -> LayerOutput:
            return LayerOutput(self.function(self._put(shared, used), x, context.rows))

        return split_layer(of_used, self.pick(shared), x, Context(rows))

    def gradients(self, shared: Tree, rows: Tree, dx: jax.Array) -> list[jax.Array]:
        """Gradients of the used leaves from that of `function(shared, rows)`.

        What has been summed over tokens is float32, whatever the leaves' dtype is.
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

    def begun(self, total: Tree, anew: jax.Array) -> Tree:
        """`total` with zeros for the used leaves where their sums begin `anew`."""
        own = [jnp.where(anew, 0, leaf) for leaf in self.pick(total)]
        return self._put(total, own)

    def unused(self, shared: Tree) -> list[jax.Array]:
        """The other leaves."""
        return [leaf for i, leaf in enumerate(jax.tree.leaves(shared)) if i not in self.used]

    def with_unused(self, shared: Tree, others: list[jax.Array]) -> Tree:
        """`shared` with these in place of the other leaves."""
        every, structure = iter(others), jax.tree.structure(shared)
        leaves = enumerate(jax.tree.leaves(shared))
        new = [leaf if i in self.used else next(every) for i, leaf in leaves]
        return jax.tree.unflatten(structure, new)

    def add(self, total: Tree, gradients: list[jax.Array | None]) -> Tree:
        """`total` with the used leaves' gradients added, in the total's own dtype."""
        leaves, structure = jax.tree.flatten(total)
        for index, gradient in zip(self.used, gradients):
            if gradient is not None:
                leaves[index] += gradient.astype(leaves[index].dtype)
        return jax.tree.unflatten(structure, leaves)
