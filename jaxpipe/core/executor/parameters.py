"""Parameters of one device: gathered for compute in a step, and their gradients reduced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.traced_kind import TracedKind
from jaxpipe.core.mesh import DP, PP, REPLICA_AXES, TP, ParamSharding, StageLayout
from jaxpipe.core.mesh.flags import is_trained, select

Tree = Any


@dataclass(frozen=True)
class DeviceParameters:
    """Parameters of one device: local shapes, layers without the leading axis of pipeline ranks.

    Attributes:
      execution: execution options.
      shardings: `ParamSharding` of every parameter.
      masters: the stored shards, in the stored dtype.
      embed_head: parameters of embedding and head in the compute dtype, gathered for compute.
      embed_head_of_layers: the same as layers read them, gathered over pp too where embedding and
        head consume them sharded over it; None: no layer reads them.
      layers: by run, parameters in the compute dtype, gathered for compute, or still shards with
        `reshard_after_forward`, where every action gathers its layers.
    """

    execution: Execution
    shardings: Tree
    masters: Tree
    embed_head: Tree
    embed_head_of_layers: Tree
    layers: tuple[Tree, ...]

    @classmethod
    def gather(
        cls, params: Tree, stored: Tree, execution: Execution, *, for_layers: bool = False
    ) -> "DeviceParameters":
        """Cast and all-gather this device's shards of `params`, inside the `shard_map`.

        `for_layers`: whether layers read embedding and head.
        """
        stored = stored | {
            "layers": jax.tree.map(lambda leaf: leaf.without_leading_axis, stored["layers"])
        }
        masters = params | {"layers": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
        dtype = execution.compute_dtype
        cast = masters
        if dtype is not None:
            is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
            cast = jax.tree.map(
                lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, masters
            )
        layers = cast["layers"]
        if not execution.reshard_after_forward:
            layers = _whole(stored["layers"], layers)
        embed_head, read = _whole(stored["embed_head"], cast["embed_head"]), None
        if for_layers:
            over_pp = lambda how, leaf: how.as_consumed.gather(leaf, {PP})  # noqa: E731
            read = jax.tree.map(over_pp, stored["embed_head"], embed_head)
        return cls(execution, stored, masters, embed_head, read, layers)

    def layer_shapes(self, run: int, layers: int) -> Tree:
        """Return the shapes of one layer of a run of `layers`, gathered for compute."""
        shapes = jax.eval_shape(lambda tree: tree, self.layers[run])
        if self.execution.reshard_after_forward:
            shapes = jax.eval_shape(partial(_whole, self.shardings["layers"][run]), shapes)
        if layers == 1:
            return shapes
        return jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape[1:], like.dtype), shapes)

    def chunks(
        self, layout: StageLayout, kinds: Sequence[TracedKind], *, mirrored: bool
    ) -> tuple[Chunk, ...]:
        """Return the chunks of this pipeline rank; `kinds` are the kinds of the ring groups.

        With `mirrored` (DualPipe), rank r also computes the stages of rank P-1-r, which sends it a
        copy of its parameters once per step.
        """
        table = np.array(
            [[-1 if i is None else i for i in row] for row in layout.layer_table], np.int32
        )
        chunks = self._chunks(self.layers, table, layout, kinds)
        if mirrored:
            chunks += self._chunks(_mirror(self.layers), table[::-1], layout, kinds)
        return chunks

    def _chunks(
        self,
        layers: tuple[Tree, ...],
        table: np.ndarray,
        layout: StageLayout,
        kinds: Sequence[TracedKind],
    ) -> tuple[Chunk, ...]:
        """Return the chunks of some layers; `table[r, slot]` is the layer index, -1 if empty."""
        here, reshard = jnp.asarray(table)[lax.axis_index(PP)], self.execution.reshard_after_forward

        def layer_run(number: int, slots: range) -> LayerRun:
            of_run, sharding = slice(slots.start, slots.stop), self.shardings["layers"][number]
            of_layer = sharding
            if len(slots) > 1:
                of_layer = jax.tree.map(lambda leaf: leaf.without_leading_axis, sharding)
            group, first = layout.ring_place_of(slots.start)
            return LayerRun(
                kind=kinds[group],
                params=layers[number],
                index=here[of_run],
                active=None if (table[:, of_run] >= 0).all() else here[of_run] >= 0,
                ring=group,
                first=first,
                grad_sums=_sum_shapes(sharding, layers[number], self.masters["layers"][number]),
                reduce=partial(self._reduce_run, sharding),
                shardings=of_layer if reshard else None,
                reduce_dtype=self.execution.grad_reduce_dtype,
                unroll=self.execution.layers_per_iteration,
            )

        runs = {slots: layer_run(number, slots) for number, slots in enumerate(layout.runs)}
        return tuple(Chunk(tuple(runs[slots] for slots in chunk)) for chunk in layout.chunk_runs)

    def gradient_shapes(self, chunks: tuple[Chunk, ...]) -> Tree:
        """Return shapes and dtypes of the gradient sums: shapes for compute, dtype of `masters`.

        A frozen parameter has none (None).
        """
        sharding, masters = self.shardings["embed_head"], self.masters["embed_head"]
        kinds, read = [run.kind for chunk in chunks for run in chunk.runs], None
        uses = [kind.split.uses_of_embed_head for kind in kinds if kind.kind.reads]
        if uses and self.execution.lockstep.vocab_parallel:
            used = jax.tree.map(lambda *flags: any(flags), *uses)
            read = select(used, _sum_shapes(sharding, self.embed_head_of_layers, masters))
        return {
            "embed_head": _sum_shapes(sharding, self.embed_head, masters),
            "read": read,
            "layers": tuple(tuple(run.grad_sums for run in chunk.runs) for chunk in chunks),
        }

    def gradients(
        self, shared: Tree, layers: tuple[tuple[Tree, ...], ...], read: Tree, *, reduced: bool
    ) -> Tree:
        """Reduce the gradient sums of the last tick to this device's gradient shards.

        Args:
          shared: gradient sums of embedding and head.
          layers: gradient sums by chunk and run.
          read: gradient sums at `embed_head_of_layers`; None: layers have added theirs to `shared`.
          reduced: the sums of layers are already reduced over replicas.

        Returns:
          Gradients sharded like the parameters, layers with the axis of pipeline ranks; None for
          frozen parameters.
        """
        home = self._add_mirrored(layers)
        if read is not None:
            shared = jax.tree.map(_with_read, self.shardings["embed_head"], shared, read)
        if not reduced:
            home = tuple(map(self._reduce_run, self.shardings["layers"], home))
        return {
            "embed_head": _map_sums(self._reduce_embed_head, self.shardings["embed_head"], shared),
            "layers": jax.tree.map(lambda gradient: gradient[None], home),
        }

    def _reduce_run(self, stored: Tree, total: Tree) -> Tree:
        """Reduce the gradient sums of a run to this device's shards."""
        return _map_sums(lambda s, g: self._reduced(s, g, self._unreduced(s)), stored, total)

    def _add_mirrored(self, gradients: tuple[tuple[Tree, ...], ...]) -> tuple[Tree, ...]:
        """Return the gradient sums of this rank's runs, with those of mirrored copies added."""
        flat = tuple(tree for chunk in gradients for tree in chunk)
        own, mirrored = flat[: len(self.layers)], flat[len(self.layers) :]
        return jax.tree.map(jnp.add, own, _mirror(mirrored)) if mirrored else own

    def _reduce_embed_head(self, stored: ParamSharding, gradient: jax.Array) -> jax.Array:
        """Reduce a gradient of embedding or head to this device's shard.

        Over pp it is partial and summed, or a shard already, or equal on all ranks and sharded.
        """
        if PP not in stored.param.sharded_axes | set(stored.param.partial_grad_axes):
            gradient = stored.shard(gradient, {PP})
        summed = {PP} & set(stored.param.partial_grad_axes)
        return self._reduced(stored, gradient, summed | set(stored.grad_reduce_axes))

    def _unreduced(self, stored: ParamSharding) -> set[str]:
        """Return the axes over which a layer's gradient must be summed after the last tick."""
        scattered = self.execution.reshard_after_forward and stored.dim_of(DP) is not None
        return set(stored.grad_reduce_axes).difference(stored.zero_axes if scattered else ())

    def _reduced(self, stored: ParamSharding, gradient: jax.Array, axes: set[str]) -> jax.Array:
        """Return the shard of a gradient summed over `axes`, and over tp where it is partial."""
        if TP in stored.param.partial_grad_axes:
            gradient = lax.psum(gradient, TP)
        replicas, how = axes.intersection(REPLICA_AXES), self.execution
        if how.zero_stage != 1 and how.grad_reduce_dtype is None:
            return stored.reduce_scatter(gradient, axes)
        gradient = stored.reduce_scatter(gradient, axes - replicas)
        return stored.reduce_over_replicas(
            gradient, replicas, how.grad_reduce_dtype, scatter=how.zero_stage != 1
        )


def _sum_shapes(sharding: Tree, values: Tree, masters: Tree) -> Tree:
    """Return the shapes of `values` in the dtypes of `masters`; None for frozen parameters."""
    shapes = jax.tree.map(
        lambda value, leaf: jax.ShapeDtypeStruct(value.shape, leaf.dtype), values, masters
    )
    return select(is_trained(sharding), shapes)


def _whole(stored: Tree, shards: Tree) -> Tree:
    """All-gather parameters for compute from this device's shards."""
    return jax.tree.map(lambda how, leaf: how.gather_for_compute(leaf), stored, shards)


def _map_sums(reduce: Callable[..., jax.Array], stored: Tree, sums: Tree) -> Tree:
    """Apply a function of a `ParamSharding` and a gradient sum; a frozen parameter has no sum."""
    return jax.tree.map(lambda how, g: None if g is None else reduce(how, g), stored, sums)


def _with_read(stored: ParamSharding, total: Any, read: jax.Array | None) -> Any:
    """Add the gradient sum of the layers that read a parameter to that of embedding and head.

    The sum of a pipeline rank's layers is partial over pp. That of embedding and head is, too, or
    it is a shard over pp, or equal on all ranks.
    """
    if read is None:
        return total
    if PP not in stored.param.partial_grad_axes:
        read = stored.as_consumed.reduce_scatter(read, {PP})
    return total + read


def _mirror(tree: Tree) -> Tree:
    """Return on pipeline rank r the tree of rank P-1-r."""
    size = lax.axis_size(PP)
    across = [(r, size - 1 - r) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, across), tree)
