"""What the executor asks of a model: three functions and a count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.pipeline.jaxpr import reads, trace_flat

Tree = Any


@dataclass(frozen=True)
class StageFunctions:
    """A model as pipeline stages see it; every function is pure.

    `microbatch` is one microbatch of the batch's tree: its leaves lose the leading axis M and are
    known to every stage, so targets, positions or segment ids need no transfer. The embedding runs
    before the first layer, the head after the last; both may read any leaf of `shared`. All layers
    have parameters of the same shapes, and every `x` has the same shape and dtype.
    """

    embed: Callable[[Tree, Tree], jax.Array]  # (shared, microbatch) -> x
    layer: Callable[[Tree, jax.Array, Tree], jax.Array]  # (params, x, microbatch) -> x
    head: Callable[[Tree, jax.Array, Tree], jax.Array]  # (shared, x, microbatch) -> summed loss
    count: Callable[[Tree], jax.Array]  # (microbatch) -> how many terms the summed loss has


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

    def vjp(
        self, shared: Tree, *inputs: jax.Array, microbatch: Tree
    ) -> tuple[jax.Array, Callable[[jax.Array], tuple[Any, ...]]]:
        """`jax.vjp` with respect to the used leaves, as a list, and the inputs."""
        leaves, structure = jax.tree.flatten(shared)

        def of_used(used: list[jax.Array], *inputs: jax.Array) -> jax.Array:
            full = list(leaves)
            for index, leaf in zip(self.used, used):
                full[index] = leaf
            return self.function(jax.tree.unflatten(structure, full), *inputs, microbatch)

        return jax.vjp(of_used, [leaves[index] for index in self.used], *inputs)

    def add(self, total: Tree, gradients: list[jax.Array]) -> Tree:
        """`total` with the used leaves' gradients added, in the total's own dtype."""
        leaves, structure = jax.tree.flatten(total)
        for index, gradient in zip(self.used, gradients):
            leaves[index] += gradient.astype(leaves[index].dtype)
        return jax.tree.unflatten(structure, leaves)
