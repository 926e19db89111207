"""The reference implementation: one device, one sequence after the other, `jax.grad`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.core.contract import Aux, Context, LayerKind, StageFunctions, Tree
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.core.mesh.sharding import param_specs_of
from jaxpipe.core.split.split import with_statistics


class StepOutput(NamedTuple):
    """The outputs of a step.

    Attributes:
      losses: each microbatch's share of the head's loss, `[M]`, or of each of its K losses,
        `[M, K]`; their sum over M is the mean over the terms of the batch.
      gradients: gradients of the sum of all losses, with those of layers, a tree like the
        parameters; None: forward-only.
      aux: sums and maxima over layers, microbatches and replicas, and per-example values of every
        microbatch, `[M, B, ...]`; it has no losses (see `aux_losses`).
      outputs: model outputs of every microbatch, `[M, B, ...]`; None: the model has none.
      counts: number of terms of the head's losses in each microbatch, `[M]`.
      aux_losses: each microbatch's share of the auxiliary losses of layers, `[M]`; their sum over M
        is that of all layers' losses, each a mean over its own terms in the batch; None: no layer
        has one.
      fingerprints: uint32, of every device's own gradient sums before any reduction, in the shape
        of the mesh; None: `Execution.fingerprints` is off.
    """

    losses: jax.Array
    gradients: Tree
    aux: Aux
    outputs: Tree = None
    counts: jax.Array | None = None
    aux_losses: jax.Array | None = None
    fingerprints: jax.Array | None = None


def total_count(counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum of counts over their last dim as a float.

    Sums of integers may exceed int32 and are rounded once: their 16-bit halves are summed apart.
    """
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        return counts.sum(-1).astype(dtype)
    high, low = (part.sum(-1).astype(dtype) for part in (counts >> 16, counts & 0xFFFF))
    return high * 2**16 + low


def divisor(total: jax.Array) -> jax.Array:
    """Return a total of counts or weights, which may be below 1, and 1 where it is 0."""
    return jnp.where(total > 0, total, 1)


def step_ref(
    functions: StageFunctions,
    embed_head: Tree,
    layers: list[Tree],
    batch: Tree,
    slices: int = 1,
    variables: Tree = None,
) -> StepOutput:
    """Compute a step on one device: losses, gradients of their sum, and auxiliary outputs.

    The head's losses and every auxiliary loss of a layer are divided by the number of their own
    terms in the batch; they are 0 where that number is 0.

    Args:
      functions: the model.
      embed_head: parameters of embedding and head.
      layers: full parameters of all layers, in order.
      batch: a tree of arrays `[M, B, ...]`.
      slices: number of consecutive microbatches that are the slices of the same sequences.
      variables: the model's variables.

    Returns:
      A `StepOutput`; its gradients are `{"embed_head": tree, "layers": [tree, ...]}`, in the dtypes
      of the parameters; None for frozen parameters.

    Raises `ValueError` where the model's order of kinds has another number of layers.

    >>> from jaxpipe.core.contract import LayerKind, LayerOutput
    >>> model = StageFunctions(
    ...     embed=lambda shared, rows: rows["inputs"] * shared["scale"],
    ...     kinds=LayerKind(lambda params, x, context: LayerOutput(x * params["gain"])),
    ...     head=lambda shared, x, rows: (x**2).sum(),
    ...     count=lambda rows: jnp.size(rows["inputs"]),
    ... )
    >>> layers = [{"gain": jnp.float32(2)}, {"gain": jnp.float32(3)}]
    >>> got = step_ref(model, {"scale": jnp.float32(1)}, layers, {"inputs": jnp.ones((4, 2, 4))})
    >>> got.losses.tolist(), float(got.gradients["layers"][0]["gain"])
    ([9.0, 9.0, 9.0, 9.0], 36.0)
    """
    return _Reference(functions, tuple(functions.layer_kinds(len(layers))), slices).step(
        {"embed_head": embed_head, "layers": layers}, batch, variables
    )


@dataclass(frozen=True)
class _Reference:
    """A model on one device; `order` names the kind of each layer."""

    functions: StageFunctions
    order: tuple[str, ...]
    slices: int

    def step(self, params: Tree, batch: Tree, variables: Tree) -> StepOutput:
        """Compute a step: one sequence after the other."""
        microbatches = [
            jax.tree.map(lambda a, m=m: a[m], batch)
            for m in range(jax.tree.leaves(batch)[0].shape[0])
        ]
        counts = [jnp.asarray(self.functions.count(rows)) for rows in microbatches]
        firsts = range(0, len(microbatches), self.slices)
        sequences = [microbatches[first : first + self.slices] for first in firsts]
        # Every layer and slice gets its own copy of the statistics variables: gradients at one
        # shared copy would be summed, not maximised.
        observed = [{name: variables[name] for name in kind.statistics} for kind in self.kinds]
        loss_counts = self._total_loss_counts(params, observed, sequences, variables)
        of_step = sum(counts), loss_counts, variables
        differentiated = jax.value_and_grad(self._losses, argnums=(0, 1), has_aux=True)
        losses_and_gradients = jax.jit(differentiated)
        trained = is_trained(self._param_specs(params))
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
        total, results = select(trained, zeros), _Results([], [], [], [])
        for sequence in sequences:
            copies = [observed] * len(sequence)
            made = losses_and_gradients(params, copies, sequence, of_step)
            (_, more), (gradients, statistics) = made
            maxima = [Aux(maxima=of_layer) for of_slice in statistics for of_layer in of_slice]
            more.aux[0] = reduce(_joined, maxima, more.aux[0])
            total = jax.tree.map(jnp.add, total, select(trained, gradients))
            results = _Results(*(old + new for old, new in zip(results, more)))
        return results.output(total, counts)

    @property
    def kinds(self) -> list[LayerKind]:
        """The kind of each layer."""
        return [self.functions.kinds_by_name[name] for name in self.order]

    def _param_specs(self, params: Tree) -> Tree:
        return {
            "embed_head": param_specs_of(
                self.functions.embed_head_specs, params["embed_head"], of_layer=False
            ),
            "layers": [
                param_specs_of(kind.param_specs, layer, of_layer=True)
                for kind, layer in zip(self.kinds, params["layers"])
            ],
        }

    def _through_layers(
        self, params: Tree, observed: list[list[Tree]], sequence: list[Tree], variables: Tree
    ) -> Iterator[tuple[jax.Array, list[Aux]]]:
        """Yield the last layer's y of every slice, and the auxiliary outputs of its layers.

        `observed` are the statistics variables by slice and layer.
        """
        states: list[Tree] = [None] * len(self.order)
        for rows, of_layers in zip(sequence, observed):
            layer_aux, x = [], self.functions.embed(params["embed_head"], rows)
            for index, (kind, layer) in enumerate(zip(self.kinds, params["layers"])):
                if kind.state is not None and states[index] is None:
                    states[index] = kind.state(x, rows)
                read = params["embed_head"] if kind.reads else None
                context = Context(rows, jnp.int32(index), states[index], variables, read)
                context = with_statistics(context, of_layers[index])
                x, states[index], aux = kind.layer(layer, x, context)
                layer_aux.append(aux)
            yield x, layer_aux

    def _loss_counts(
        self, params: Tree, observed: list[list[Tree]], sequence: list[Tree], variables: Tree
    ) -> list[dict[str, jax.Array]]:
        """Return the number of terms of every layer's losses in a sequence, by layer and name."""
        slices = [aux for _, aux in self._through_layers(params, observed, sequence, variables)]
        return [
            {name: sum(of.loss_counts[name] for of in slices) for name in slices[0].losses}
            for slices in zip(*slices)
        ]

    def _total_loss_counts(
        self, params: Tree, observed: list[Tree], sequences: list[list[Tree]], variables: Tree
    ) -> list[dict[str, jax.Array]]:
        """Return `_loss_counts` of all sequences."""
        copies = [observed] * self.slices
        if not any(jax.eval_shape(self._loss_counts, params, copies, sequences[0], variables)):
            return [{} for _ in self.order]
        count = jax.jit(self._loss_counts)
        counted = [count(params, copies, sequence, variables) for sequence in sequences]
        return jax.tree.map(lambda *of_sequences: sum(of_sequences), *counted)

    def _losses(
        self, params: Tree, observed: list[list[Tree]], sequence: list[Tree],
        of_step: tuple[Any, ...],
    ) -> tuple[jax.Array, "_Results"]:  # fmt: skip
        """Return the sum of all shares of a sequence in the step's losses, and its results.

        `of_step` are the terms of the head's losses and of each layer's, and the variables. They
        are arguments, because constants would be compiled in.
        """
        terms, loss_counts, variables = of_step
        results = _Results([], [], [], [])
        through_layers = self._through_layers(params, observed, sequence, variables)
        for rows, (x, layer_aux) in zip(sequence, through_layers):
            results.aux.append(reduce(_joined, layer_aux, Aux()))
            if self.functions.outputs is not None:
                results.outputs.append(self.functions.outputs(params["embed_head"], x, rows))
            loss = self.functions.head(params["embed_head"], x, rows)
            results.losses.append(jnp.where(terms > 0, loss / divisor(terms), 0))
            means = [
                jnp.where(of[name] > 0, total / divisor(of[name]), 0)
                for of, aux in zip(loss_counts, layer_aux)
                for name, total in aux.loss_sums.items()
            ]
            if means:
                results.aux_losses.append(reduce(jnp.add, means))
        return reduce(jnp.add, results.losses).sum() + sum(results.aux_losses), results


class _Results(NamedTuple):
    """What the microbatches of some sequences make, in order; as in `StepOutput`."""

    losses: list[jax.Array]
    aux_losses: list[jax.Array]
    outputs: list[Tree]
    aux: list[Aux]

    def output(self, gradients: Tree, counts: list[jax.Array]) -> StepOutput:
        """Return the output of the step."""
        outputs = _stack(self.outputs) if self.outputs else None
        aux = reduce(_joined, self.aux, Aux())
        aux = aux._replace(per_example=_stack([of.per_example for of in self.aux]))
        aux_losses = jnp.stack(self.aux_losses) if self.aux_losses else None
        losses = jnp.stack(self.losses)
        return StepOutput(losses, gradients, aux, outputs, jnp.stack(counts), aux_losses)


def _stack(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def losses_and_gradients_ref(*args: Any, **kwargs: Any) -> tuple[jax.Array, Tree]:
    """Return the losses and gradients of `step_ref`."""
    return step_ref(*args, **kwargs)[:2]


def _joined(left: Aux, right: Aux) -> Aux:
    """Merge auxiliary outputs: sums are added, maxima maximised; losses are counted elsewhere."""

    def joined(left: Tree, right: Tree, join: Any) -> Tree:
        both = {name: join(left[name], right[name]) for name in left.keys() & right.keys()}
        return dict(sorted((dict(left) | dict(right) | both).items()))

    return Aux(
        {},
        joined(left.sums, right.sums, jnp.add),
        joined(left.maxima, right.maxima, jnp.maximum),
        joined(left.per_example, right.per_example, jnp.add),
    )
