"""The reference implementation: one device, one sequence after the other, `jax.grad`."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.core.contract import Aux, Context, StageFunctions, Tree
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
    shared: Tree,
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
      shared: parameters of embedding and head.
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
    microbatches = [
        jax.tree.map(lambda a, m=m: a[m], batch) for m in range(jax.tree.leaves(batch)[0].shape[0])
    ]
    counts = [jnp.asarray(functions.count(rows)) for rows in microbatches]
    terms = sum(counts)
    kinds = [functions.kinds_by_name[name] for name in functions.layer_kinds(len(layers))]

    def through_layers(params: Tree, seen: list[list[Tree]], sequence: list[Tree], variables: Tree):
        """Yield the last layer's y of every slice, and the auxiliary outputs of its layers."""
        states = [None] * len(kinds)
        for rows, of_layers in zip(sequence, seen):
            layer_aux, x = [], functions.embed(params["embed_head"], rows)
            for index, (kind, layer) in enumerate(zip(kinds, params["layers"])):
                if kind.state is not None and states[index] is None:
                    states[index] = kind.state(x, rows)
                read = params["embed_head"] if kind.reads else None
                context = Context(rows, jnp.int32(index), states[index], variables, read)
                context = with_statistics(context, of_layers[index])
                x, states[index], side = kind.layer(layer, x, context)
                layer_aux.append(side)
            yield x, layer_aux

    def numbers(params: Tree, seen: list[list[Tree]], sequence: list[Tree], variables: Tree):
        """Return the number of terms of every layer's losses in a sequence, by layer and name."""
        slices = [aux for _, aux in through_layers(params, seen, sequence, variables)]
        return [
            {name: sum(of.loss_counts[name] for of in slices) for name in slices[0].losses}
            for slices in zip(*slices)
        ]

    def shares(
        params: Tree, seen: list[list[Tree]], sequence: list[Tree], of_step: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        terms, of_layers, variables = of_step  # arguments: as constants they would be compiled in
        losses, aux, sides, outputs = [], [], [], []
        through = through_layers(params, seen, sequence, variables)
        for rows, (x, layer_aux) in zip(sequence, through):
            sides.append(reduce(_joined, layer_aux, Aux()))
            if functions.outputs is not None:
                outputs.append(functions.outputs(params["embed_head"], x, rows))
            loss = functions.head(params["embed_head"], x, rows)
            losses.append(jnp.where(terms > 0, loss / divisor(terms), 0))
            means = [
                jnp.where(of[name] > 0, total / divisor(of[name]), 0)
                for of, side in zip(of_layers, layer_aux)
                for name, total in side.loss_sums.items()
            ]
            if means:
                aux.append(sum(means))
        return sum(losses).sum() + sum(aux), (losses, aux, outputs, sides)

    # Every layer and slice gets its own copy of the statistics variables: gradients at one shared
    # copy would be summed, not maximised.
    seen = [{name: variables[name] for name in kind.statistics} for kind in kinds]
    shares_and_gradients = jax.jit(jax.value_and_grad(shares, argnums=(0, 1), has_aux=True))
    params = {"embed_head": shared, "layers": layers}
    specs = {
        "embed_head": param_specs_of(functions.embed_head_specs, shared, of_layer=False),
        "layers": [
            param_specs_of(kind.param_specs, layer, of_layer=True)
            for kind, layer in zip(kinds, layers)
        ],
    }
    trained = is_trained(specs)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    total, sides = select(trained, zeros), []
    all_losses, all_aux, all_outputs = [], [], []
    sequences = [microbatches[i : i + slices] for i in range(0, len(microbatches), slices)]
    of_layers = [{} for _ in kinds]
    if any(jax.eval_shape(numbers, params, [seen] * slices, sequences[0], variables)):
        count = jax.jit(numbers)
        counted = [count(params, [seen] * slices, sequence, variables) for sequence in sequences]
        of_layers = jax.tree.map(lambda *of_sequences: sum(of_sequences), *counted)
    for sequence in sequences:
        of_step = terms, of_layers, variables
        made = shares_and_gradients(params, [seen] * len(sequence), sequence, of_step)
        (_, (losses, aux, outputs, more)), (gradients, statistics) = made
        observed = [Aux(maxima=maxima) for of_slice in statistics for maxima in of_slice]
        more[0] = reduce(_joined, observed, more[0])
        all_losses, all_aux = all_losses + losses, all_aux + aux
        all_outputs = all_outputs + outputs
        total = jax.tree.map(jnp.add, total, select(trained, gradients))
        sides += more
    stacked = lambda *of_each: jnp.stack(of_each)  # noqa: E731
    outputs = jax.tree.map(stacked, *all_outputs or (None,))
    rows = jax.tree.map(stacked, *(side.per_example for side in sides))
    side = reduce(_joined, sides, Aux())._replace(per_example=rows)
    aux_losses = jnp.stack(all_aux) if all_aux else None
    return StepOutput(jnp.stack(all_losses), total, side, outputs, jnp.stack(counts), aux_losses)


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
