"""Parameters of one device: gathered for compute in a step, and their gradients reduced."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.traced_kind import BufferedKind
from jaxpipe.core.mesh import DP, PP, REPLICA_AXES, TP, ParamSharding, StageLayout
from jaxpipe.core.mesh.flags import is_trained, merge, select


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
        cls, params: Tree, shardings: Tree, execution: Execution, *, for_layers: bool = False
    ) -> "DeviceParameters":
        """Cast and all-gather this device's shards of `params`, inside the `shard_map`.

        `for_layers`: whether layers read embedding and head.
        """
        of_layers = jax.tree.map(lambda leaf: leaf.without_leading_axis, shardings["layers"])
        shardings = shardings | {"layers": of_layers}
        masters = params | {"layers": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
        cast = jax.tree.map(partial(_cast_float, dtype=execution.compute_dtype), masters)
        layers = cast["layers"]
        if not execution.reshard_after_forward:
            layers = _gather_for_compute(of_layers, layers)
        embed_head = _gather_for_compute(shardings["embed_head"], cast["embed_head"])
        read = None
        if for_layers:
            read = jax.tree.map(_gather_over_pp, shardings["embed_head"], embed_head)
        return cls(execution, shardings, masters, embed_head, read, layers)

    def layer_shapes(self, run: int, layers: int) -> Tree:
        """Return the shapes of one layer of a run of `layers`, gathered for compute."""
        shapes = jax.eval_shape(lambda tree: tree, self.layers[run])
        if self.execution.reshard_after_forward:
            shapes = jax.eval_shape(
                partial(_gather_for_compute, self.shardings["layers"][run]), shapes
            )
        if layers == 1:
            return shapes
        return jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape[1:], like.dtype), shapes)

    def chunks(
        self, layout: StageLayout, kinds: Sequence[BufferedKind], *, mirrored: bool
    ) -> tuple[Chunk, ...]:
        """Return the chunks of this pipeline rank; `kinds` are the kinds of the ring groups.

        With `mirrored` (DualPipe), rank r also computes the stages of rank P-1-r, which sends it a
        copy of its parameters once per step.
        """
        table = _layer_table(layout)
        reshard = self.execution.reshard_after_forward
        chunks = self._chunks(self.layers, table, layout, kinds, reshard=reshard)
        if mirrored:
            chunks += self._chunks(
                _mirror(self.layers), table[::-1], layout, kinds, reshard=reshard
            )
        return chunks

    def first_chunk(self, layout: StageLayout, kinds: Sequence[BufferedKind]) -> Chunk:
        """Return the first chunk of this pipeline rank, whose F gathers its layers one by one."""
        cast = partial(_cast_float, dtype=self.execution.compute_dtype)
        shards = jax.tree.map(cast, self.masters["layers"])
        return self._chunks(shards, _layer_table(layout), layout, kinds, reshard=True)[0]

    def _chunks(
        self,
        layers: tuple[Tree, ...],
        table: np.ndarray,
        layout: StageLayout,
        kinds: Sequence[BufferedKind],
        *,
        reshard: bool,
    ) -> tuple[Chunk, ...]:
        """Return the chunks of some layers, for `table` of `_layer_table`.

        `reshard`: the layers are shards, which every action gathers.
        """
        here = jnp.asarray(table)[lax.axis_index(PP)]

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
        self,
        embed_head: Tree,
        layers: tuple[tuple[Tree, ...], ...],
        read: Tree,
        early: Tree | None = None,
    ) -> Tree:
        """Reduce the gradient sums of the last tick to this device's gradient shards.

        Args:
          embed_head: gradient sums of embedding and head.
          layers: gradient sums by chunk and run.
          read: gradient sums at `embed_head_of_layers`; None: layers have added theirs to
            `embed_head`.
          early: flags of the sums of embedding and head that are already reduced, as all sums of
            layers then are; None: no sum is.

        Returns:
          Gradients sharded like the parameters, layers with the axis of pipeline ranks; None for
          frozen parameters.
        """
        runs = self._with_mirrored(layers)
        if read is not None:
            embed_head = jax.tree.map(_with_read, self.shardings["embed_head"], embed_head, read)
        if early is None:
            runs = tuple(map(self._reduce_run, self.shardings["layers"], runs))
            embed_head = self.reduce_embed_head(embed_head)
        else:
            late = select(jax.tree.map(operator.not_, early), embed_head)
            embed_head = merge(early, embed_head, self.reduce_embed_head(late))
        return {
            "embed_head": embed_head,
            "layers": jax.tree.map(lambda gradient: gradient[None], runs),
        }

    def _reduce_run(self, shardings: Tree, sums: Tree) -> Tree:
        """Reduce the gradient sums of a run to this device's shards."""
        return _map_sums(self._reduce_layer_gradient, shardings, sums)

    def _reduce_layer_gradient(self, sharding: ParamSharding, gradient: jax.Array) -> jax.Array:
        """Reduce a gradient of a run over the axes that actions have not reduced it over."""
        axes = set(sharding.grad_reduce_axes)
        if self.execution.reshard_after_forward and sharding.dim_of(DP) is not None:
            axes -= set(sharding.zero_axes)
        return self._reduce(sharding, gradient, axes)

    def _with_mirrored(self, gradients: tuple[tuple[Tree, ...], ...]) -> tuple[Tree, ...]:
        """Return the gradient sums of this rank's runs, with those of mirrored copies added."""
        runs = tuple(run for chunk in gradients for run in chunk)
        runs, mirrored = runs[: len(self.layers)], runs[len(self.layers) :]
        return jax.tree.map(jnp.add, runs, _mirror(mirrored)) if mirrored else runs

    def reduce_embed_head(self, sums: Tree) -> Tree:
        """Reduce gradient sums of embedding and head to this device's shards; None stays None."""
        return _map_sums(self._reduce_embed_head, self.shardings["embed_head"], sums)

    def _reduce_embed_head(self, sharding: ParamSharding, gradient: jax.Array) -> jax.Array:
        """Reduce a gradient of embedding or head to this device's shard.

        Over pp it is partial and summed, or a shard already, or equal on all ranks and sharded.
        """
        if PP not in sharding.param.sharded_axes | set(sharding.param.partial_grad_axes):
            gradient = sharding.shard(gradient, {PP})
        summed = {PP} & set(sharding.param.partial_grad_axes)
        return self._reduce(sharding, gradient, summed | set(sharding.grad_reduce_axes))

    def _reduce(self, sharding: ParamSharding, gradient: jax.Array, axes: set[str]) -> jax.Array:
        """Return the shard of a gradient summed over `axes`, and over tp where it is partial."""
        if TP in sharding.param.partial_grad_axes:
            gradient = lax.psum(gradient, TP)
        zero_stage, dtype = self.execution.zero_stage, self.execution.grad_reduce_dtype
        if zero_stage != 1 and dtype is None:
            return sharding.reduce_scatter(gradient, axes)
        replicas = axes.intersection(REPLICA_AXES)
        gradient = sharding.reduce_scatter(gradient, axes - replicas)
        return sharding.reduce_over_replicas(gradient, replicas, dtype, scatter=zero_stage != 1)


def _layer_table(layout: StageLayout) -> np.ndarray:
    """Return the layer in each slot of every pipeline rank, `[P, slots]`; -1 if it is empty."""
    table = [[-1 if i is None else i for i in row] for row in layout.layer_table]
    return np.array(table, np.int32)


def _cast_float(leaf: jax.Array, dtype: Any) -> jax.Array:
    """Return a floating-point array in a dtype (None: unchanged), and any other as it is."""
    if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(dtype)


def _gather_for_compute(shardings: Tree, shards: Tree) -> Tree:
    """All-gather parameters for compute from this device's shards."""
    return jax.tree.map(
        lambda sharding, shard: sharding.gather_for_compute(shard), shardings, shards
    )


def _gather_over_pp(sharding: ParamSharding, leaf: jax.Array) -> jax.Array:
    """All-gather a parameter of embedding or head over pp, if they consume it sharded over pp."""
    return sharding.as_consumed.gather(leaf, {PP})


def _sum_shapes(shardings: Tree, values: Tree, masters: Tree) -> Tree:
    """Return the shapes of `values` in the dtypes of `masters`; None for frozen parameters."""
    shapes = jax.tree.map(
        lambda value, leaf: jax.ShapeDtypeStruct(value.shape, leaf.dtype), values, masters
    )
    return select(is_trained(shardings), shapes)


def _map_sums(reduce: Callable[..., jax.Array], shardings: Tree, sums: Tree) -> Tree:
    """Apply a function of a `ParamSharding` and a gradient sum; a frozen parameter has no sum."""
    return jax.tree.map(
        lambda sharding, gradient: None if gradient is None else reduce(sharding, gradient),
        shardings, sums,
    )  # fmt: skip


def _with_read(sharding: ParamSharding, total: Any, read: jax.Array | None) -> Any:
    """Add the gradient sum of the layers that read a parameter to that of embedding and head.

    The sum of a pipeline rank's layers is partial over pp. That of embedding and head is, too, or
    it is a shard over pp, or equal on all ranks.
    """
    if read is None:
        return total
    if PP not in sharding.param.partial_grad_axes:
        read = sharding.as_consumed.reduce_scatter(read, {PP})
    return total + read


def _mirror(tree: Tree) -> Tree:
    """Return on pipeline rank r the tree of rank P-1-r."""
    size = lax.axis_size(PP)
    across = [(r, size - 1 - r) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, across), tree)
