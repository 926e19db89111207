"""Run an F and a gradient action of one cell together, layer by layer (DualPipe)."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax import lax

from jaxpipe.core.contract.layer import Pair
from jaxpipe.core.executor.action_values import BackwardOutputs, ForwardOutputs
from jaxpipe.core.executor.chunk import run_in_order


def run_paired(
    forward: Sequence[Callable[[ForwardOutputs], ForwardOutputs]], f_outputs: ForwardOutputs,
    gradient: Sequence[Callable[[BackwardOutputs], BackwardOutputs]], b_outputs: BackwardOutputs,
    pairs: Sequence[Pair | None],
) -> tuple[ForwardOutputs, BackwardOutputs]:  # fmt: skip
    """Run F of a chunk and a gradient action of another; return the outputs of both.

    The i-th layer that F runs is paired with the i-th layer that the gradient action runs (which
    starts at the last layer of its chunk); further layers of the longer chunk run alone at the end.
    After a pair whose F layer has a `LayerKind.pair`, the next layers of both wait for both.

    Args:
      forward: F of every layer, in order.
      f_outputs: outputs before F; their y is the input of F.
      gradient: the gradient action of every layer, in order.
      b_outputs: outputs before the gradient action; their dx is its dy.
      pairs: `LayerKind.pair` of F's layers; None: the two layers run without order between them.
    """
    together = min(len(forward), len(gradient)) if any(pairs) else 0
    for ahead, back, pair in zip(forward[:together], gradient[:together], pairs):
        if pair is None:
            f_outputs, b_outputs = ahead(f_outputs), back(b_outputs)
        else:
            run_f = partial(_run_on_y, ahead, f_outputs)
            run_b = partial(_run_on_dy, back, b_outputs)
            f_outputs, b_outputs = pair((run_f, f_outputs.y), (run_b, b_outputs.dx))
            y, dx = lax.optimization_barrier((f_outputs.y, b_outputs.dx))
            f_outputs, b_outputs = f_outputs._replace(y=y), b_outputs._replace(dx=dx)
    return run_in_order(forward[together:], f_outputs), run_in_order(gradient[together:], b_outputs)


def _run_on_y(
    layer: Callable[[ForwardOutputs], ForwardOutputs], before: ForwardOutputs, y: jax.Array
) -> ForwardOutputs:
    return layer(before._replace(y=y))


def _run_on_dy(
    layer: Callable[[BackwardOutputs], BackwardOutputs], before: BackwardOutputs, dy: jax.Array
) -> BackwardOutputs:
    return layer(before._replace(dx=dy))
