"""What the executor asks of a model: three functions and a count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.pipeline.jaxpr import reads, trace_flat
from jaxpipe.pipeline.split import LayerSplit, split_layer

Tree = Any


@dataclass(frozen=True)
class StageFunctions:
    """A model as pipeline stages see it; every function is pure.

    `microbatch` is one microbatch of the batch's tree: its leaves lose the leading axis M and are
    known to every stage, so targets, positions or segment ids need no transfer. The embedding runs
    before the first layer, the head after the last; both may read any leaf of `shared`. All layers
    have parameters of the same shapes, and every `x` has the same shape and dtype.

    Where devices along tp share the layers, the functions take one device's parts and call
    collectives over tp; `cuts` then says how every parameter is divided: trees of `Cut`s named
    `shared` and `layer`.

    Where sequences are cut into slices, each a microbatch, `state` makes what the slices share in a
    layer before the first of them, which must be zeros; `layer` then takes `(x, state)` and returns
    the next. Its gradient must read only the state that it returns, and find there the same after
    later slices.
    """

    embed: Callable[[Tree, Tree], jax.Array]  # (shared, microbatch) -> x
    layer: Callable[[Tree, Tree, Tree], Tree]  # (params, x, microbatch) -> x
    head: Callable[[Tree, jax.Array, Tree], jax.Array]  # (shared, x, microbatch) -> summed loss
    count: Callable[[Tree], jax.Array]  # (microbatch) -> how many terms the summed loss has
    cuts: Tree = None
    state: Callable[[jax.Array, Tree], Tree] | None = None  # (x, microbatch) -> state

    def entering(self, x: Any, microbatch: Tree) -> Any:
        """Shapes of what the first slice of a sequence gives to a layer."""
        if self.state is None:
            return x
        return jax.eval_shape(lambda x, microbatch: (x, self.state(x, microbatch)), x, microbatch)


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

    def split(self, shared: Tree, x: Any, microbatch: Tree) -> LayerSplit:
        """`function` cut like a layer whose parameters are the used leaves."""

        def of_used(used: list[jax.Array], x: jax.Array, microbatch: Tree) -> jax.Array:
            return self.function(self._put(shared, used), x, microbatch)

        return split_layer(of_used, self.pick(shared), x, microbatch)

    def gradients(self, shared: Tree, microbatch: Tree, dx: jax.Array) -> list[jax.Array]:
        """Gradients of the used leaves from that of `function(shared, microbatch)`."""
        _, pull = jax.vjp(
            lambda used: self.function(self._put(shared, used), microbatch), self.pick(shared)
        )
        return pull(dx)[0]

    def _put(self, shared: Tree, used: list[jax.Array]) -> Tree:
        leaves, structure = jax.tree.flatten(shared)
        for index, leaf in zip(self.used, used):
            leaves[index] = leaf
        return jax.tree.unflatten(structure, leaves)

    def add(self, total: Tree, gradients: list[jax.Array | None]) -> Tree:
        """`total` with the used leaves' gradients added, in the total's own dtype."""
        leaves, structure = jax.tree.flatten(total)
        for index, gradient in zip(self.used, gradients):
            if gradient is not None:
                leaves[index] += gradient.astype(leaves[index].dtype)
        return jax.tree.unflatten(structure, leaves)
