"""A rank's parameters: what its ops read in a step, and the gradients that the step leaves."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.parallel import DP, PP, TP, Stored
from jaxpipe.pipeline.chunk import Chunk
from jaxpipe.pipeline.execution import Execution

Tree = Any


@dataclass(frozen=True)
class RankParameters:
    """One rank's parameters: local shapes, layers without their leading axis of ranks.

    `masters` are the parts that outlive the step, `stored` says how. `shared` and `layers` are what
    ops read, in the compute dtype: put together over dp, but for layers that every action gathers.
    """

    execution: Execution
    stored: Tree
    masters: Tree
    shared: Tree
    layers: tuple[Tree, ...]

    @classmethod
    def of(cls, params: Tree, stored: Tree, execution: Execution) -> "RankParameters":
        """Gathered from what this device stores of `params`, inside the `shard_map`."""
        stored = stored | {"layers": jax.tree.map(lambda leaf: leaf.of_rank, stored["layers"])}
        masters = params | {"layers": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
        dtype = execution.compute_dtype
        held = masters
        if dtype is not None:
            held = jax.tree.map(lambda leaf: leaf.astype(dtype), masters)
        shared = jax.tree.map(
            lambda s, leaf: s.gather(leaf, {DP} if s.ranks == "part" else {PP, DP}),
            stored["shared"],
            held["shared"],
        )
        layers = held["layers"]
        if not execution.reshard_after_forward:
            layers = tuple(_whole(stored["layers"][0], layer) for layer in layers)
        return cls(execution, stored, masters, shared, layers)

    @property
    def one_layer(self) -> Tree:
        """Shapes of a whole layer as ops read it."""
        each = self.stored["layers"][0]
        reshard = self.execution.reshard_after_forward
        return jax.eval_shape(
            lambda layer: _whole(each, layer) if reshard else layer, self.layers[0]
        )

    def chunks(self, active: np.ndarray) -> tuple[Chunk, ...]:
        """The stages this rank computes; where there are more than it holds, the rest is mirrored.

        `active` `[P, chunks, slots]`: whether a rank has a layer there. A mirrored stage of rank r
        is held by rank P-1-r, which sends a copy of it once a step.
        """
        _, chunks, slots = active.shape
        layers = self.layers
        if chunks * slots > len(layers):
            layers = (*layers, *_mirror(layers))
        here = jnp.asarray(active)[lax.axis_index(PP)]
        gathered = self.stored["layers"][0] if self.execution.reshard_after_forward else None
        return tuple(
            Chunk(
                layers[chunk * slots : (chunk + 1) * slots],
                tuple(
                    None if active[:, chunk, slot].all() else here[chunk, slot]
                    for slot in range(slots)
                ),
                gathered,
            )
            for chunk in range(chunks)
        )

    def totals(self, chunks: tuple[Chunk, ...]) -> Tree:
        """Shapes and dtypes of the sums of gradients: the masters' dtype, as large as ops read."""
        like = lambda values, leaves: jax.tree.map(  # noqa: E731
            lambda value, leaf: jax.ShapeDtypeStruct(value.shape, leaf.dtype), values, leaves
        )
        layer = like(self.layers[0], self.masters["layers"][0])
        return {
            "shared": like(self.shared, self.masters["shared"]),
            "layers": tuple((layer,) * len(chunk.layers) for chunk in chunks),
        }

    def gradients(self, shared: Tree, layers: tuple[tuple[Tree, ...], ...]) -> Tree:
        """This device's parts of the gradients, from the sums that the last tick left.

        Layers come by chunk and slot, and leave as they are stored, with the axis of ranks.
        """
        home = self._brought_home(layers)
        return {
            "shared": jax.tree.map(self._of_shared, self.stored["shared"], shared),
            "layers": jax.tree.map(
                lambda s, g: self._reduced(s, g, self._unreduced(s))[None],
                self.stored["layers"],
                home,
            ),
        }

    def _brought_home(self, gradients: tuple[tuple[Tree, ...], ...]) -> tuple[Tree, ...]:
        """Those of the layers that this rank holds, those of their mirrored copies added."""
        flat = tuple(tree for chunk in gradients for tree in chunk)
        own, mirrored = flat[: len(self.layers)], flat[len(self.layers) :]
        return jax.tree.map(jnp.add, own, _mirror(mirrored)) if mirrored else own

    def _of_shared(self, stored: Stored, gradient: jax.Array) -> jax.Array:
        """Of a leaf that no layer has."""
        if stored.ranks == "same":
            gradient = stored.part(gradient, {PP})
        return self._reduced(stored, gradient, {PP, DP} if stored.ranks == "add" else {DP})

    def _unreduced(self, stored: Stored) -> set[str]:
        """The axes over which a layer's gradient is still to be summed after the last tick."""
        scattered = self.execution.reshard_after_forward and stored.axis(DP) is not None
        return set() if scattered else {DP}

    def _reduced(self, stored: Stored, gradient: jax.Array, names: set[str]) -> jax.Array:
        """The part of a gradient summed over these axes, and over tp where it must be."""
        if stored.summed:
            gradient = lax.psum(gradient, TP)
        if self.execution.zero_stage == 1 and DP in names:
            gradient = stored.reduce(gradient, names - {DP})
            return stored.part(lax.psum(gradient, DP), {DP})
        return stored.reduce(gradient, names)


def _whole(stored: Tree, layer: Tree) -> Tree:
    """A layer with its parts over dp put together."""
    return jax.tree.map(lambda s, leaf: s.gather(leaf, {DP}), stored, layer)


def _mirror(tree: Tree) -> Tree:
    """What rank P-1-r has, on rank r."""
    size = lax.axis_size(PP)
    across = [(r, size - 1 - r) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, across), tree)
