"""The oracle: the same functions on one device, one sequence after the other, by `jax.grad`."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.contract import Context, Side, StageFunctions
from jaxpipe.pipeline.split import observing

Tree = Any


class StepOutput(NamedTuple):
    """What a step computes.

    Attributes:
      losses: each microbatch's share of the head's loss, `[M]`, or of each of its K losses,
        `[M, K]`: their sum over M is the mean over the terms of the batch.
      gradients: of the sum of all losses, those of layers too, a tree like the parameters'; None:
        forward only.
      side: sums and maxima over all layers, microbatches and replicas, and of every microbatch the
        rows, `[M, B, ...]`; its loss is in `aux_losses`.
      outputs: what the model gives back of every microbatch, `[M, B, ...]`; None: nothing.
      counts: the terms of the head's losses in each microbatch, integers `[M]`.
      aux_losses: each microbatch's share of the losses that layers make, `[M]`: their sum is the
        mean over the tokens of the batch, added up over layers; None: no layer makes one.
    """

    losses: jax.Array
    gradients: Tree
    side: Side
    outputs: Tree = None
    counts: jax.Array | None = None
    aux_losses: jax.Array | None = None


def total_count(counts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The sum of integer counts over their last dim as a float, rounded once.

    It may be more than an int32 can hold: what is summed are the counts' halves of 16 bits.
    """
    high, low = (part.sum(-1).astype(dtype) for part in (counts >> 16, counts & 0xFFFF))
    return high * 2**16 + low


def step_ref(
    functions: StageFunctions,
    shared: Tree,
    layers: list[Tree],
    batch: Tree,
    slices: int = 1,
    variables: Tree = None,
) -> StepOutput:
    """Each microbatch's share of the loss, the gradients of their sum, and the side outputs.

    `layers` are the parameters of all layers in order, of whole layers: no device shares them. The
    leaves of `batch` are `[M, B, ...]`; so many `slices` in a row are microbatches of the same
    sequences. `variables` is what layers find in their context. Gradients come as
    `{"shared": tree, "layers": [tree, ...]}`, in the parameters' dtypes. The head's losses are
    divided by the number of their terms, those of layers by the number of tokens
    (`StageFunctions.tokens`); either is 0 where there are none.

    Raises `ValueError` where the order of kinds has another number of layers.

    >>> from jaxpipe.contract import LayerKind, LayerOutput
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
    tokens = sum(map(functions.tokens, microbatches)) if functions.tokens else terms
    kinds = [functions.by_name[name] for name in functions.kinds_of(len(layers))]

    def shares(
        params: Tree, seen: list[list[Tree]], sequence: list[Tree]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        losses, aux, sides, outputs, states = [], [], [], [], [None] * len(kinds)
        for rows, of_layers in zip(sequence, seen):
            made = []
            x, more = functions.embed(params["shared"], rows), None
            for index, (kind, layer) in enumerate(zip(kinds, params["layers"])):
                if kind.state is not None and states[index] is None:
                    states[index] = kind.state(x, rows)
                context = Context(rows, jnp.int32(index), states[index], variables)
                context = observing(context, of_layers[index])
                x, states[index], side = kind.layer(layer, x, context)
                if side.loss is not None:
                    more = side.loss if more is None else more + side.loss
                made.append(side)
            sides.append(reduce(_joined, made, Side()))
            if functions.outputs is not None:
                outputs.append(functions.outputs(params["shared"], x, rows))
            loss = functions.head(params["shared"], x, rows)
            losses.append(jnp.where(terms > 0, loss / jnp.maximum(terms, 1), 0))
            if more is not None:
                aux.append(jnp.where(tokens > 0, more / jnp.maximum(tokens, 1), 0))
        return sum(losses).sum() + sum(aux), (losses, aux, outputs, sides)

    # Everywhere copies of what is observed, for the gradients at one would be added up.
    seen = [{name: variables[name] for name in kind.observed} for kind in kinds]
    shares_and_gradients = jax.jit(jax.value_and_grad(shares, argnums=(0, 1), has_aux=True))
    params = {"shared": shared, "layers": layers}
    total, sides = jax.tree.map(jnp.zeros_like, params), []
    every, every_aux, every_output = [], [], []
    for first in range(0, len(microbatches), slices):
        sequence = microbatches[first : first + slices]
        made = shares_and_gradients(params, [seen] * len(sequence), sequence)
        (_, (losses, aux, outputs, more)), (gradients, left) = made
        observed = [Side(maxima=one) for of_slice in left for one in of_slice]
        more[0] = reduce(_joined, observed, more[0])
        every, every_aux = every + losses, every_aux + aux
        every_output = every_output + outputs
        total, sides = jax.tree.map(jnp.add, total, gradients), sides + more
    stacked = lambda *of_each: jnp.stack(of_each)  # noqa: E731
    outputs = jax.tree.map(stacked, *every_output or (None,))
    rows = jax.tree.map(stacked, *(side.rows for side in sides))
    side = reduce(_joined, sides, Side())._replace(rows=rows)
    aux_losses = jnp.stack(every_aux) if every_aux else None
    return StepOutput(jnp.stack(every), total, side, outputs, jnp.stack(counts), aux_losses)


def losses_and_gradients_ref(*args: Any, **kwargs: Any) -> tuple[jax.Array, Tree]:
    """The losses and gradients of `step_ref`."""
    return step_ref(*args, **kwargs)[:2]


def _joined(left: Side, right: Side) -> Side:
    """The sums of both, and the larger maxima; their losses are in the loss."""

    def joined(left: Tree, right: Tree, join: Any) -> Tree:
        both = {name: join(left[name], right[name]) for name in left.keys() & right.keys()}
        return dict(sorted((dict(left) | dict(right) | both).items()))

    return Side(
        None,
        joined(left.sums, right.sums, jnp.add),
        joined(left.maxima, right.maxima, jnp.maximum),
        joined(left.rows, right.rows, jnp.add),
    )
