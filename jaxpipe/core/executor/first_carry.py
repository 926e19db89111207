"""The carry of the scan before its first tick."""

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.tick import DeviceWork, transfers_of
from jaxpipe.core.executor.traced_kind import empty_aux, empty_statistics


def first_carry(
    work: DeviceWork, step: StepData, x: jax.ShapeDtypeStruct, rows: Tree, gradients: Tree
) -> Carry:
    """Return the carry of the first tick, with empty buffers and zero gradients.

    Args:
      step: what stays constant during the step.
      x: shape and dtype of the activation between stages.
      rows: shapes and dtypes of the batch rows of a microbatch.
      gradients: shapes and dtypes of the gradient accumulators.
    """
    slots = step.tables.slots
    makes_losses = any(kind.output.aux.losses for kind in work.kinds)
    message = jnp.full(x.shape, jnp.nan if step.poison else 0, x.dtype)
    microbatches = jax.tree.leaves(step.batch)[0].shape[0]
    loss, outputs = work.embed_head.result_shapes(step, x, rows)
    carry = Carry(
        y=message,
        dx=None,
        arriving=transfers_of(step).arriving(message),
        inbox=_ring(step, slots.inbox + 1, x),
        rings=tuple(
            rings.empty(group, poison=step.poison) for group, rings in enumerate(work.rings)
        ),
        head_ring=(),
        embed_ring=(),
        layer_gradients=(),
        embed_head_gradients=None,
        read_gradients=None,
        losses=jnp.zeros((microbatches, *loss.shape), loss.dtype),
        aux_losses=jnp.zeros(microbatches, loss.dtype) if makes_losses else None,
        aux=empty_aux(work.kinds, microbatches),
        statistics={},
        outputs=jax.tree.map(
            lambda like: jnp.zeros((microbatches, *like.shape), like.dtype), outputs
        ),
    )
    if not step.tables.has_gradients:
        return carry
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), gradients)
    if slots.head:
        head = work.embed_head.split
        for_head = _ring(step, slots.head, (head.residuals.for_w, head.stash))
        carry = carry._replace(head_ring=for_head)
    if slots.embed:
        carry = carry._replace(embed_ring=_ring(step, slots.embed + 1, x))
    return carry._replace(
        dx=message,
        statistics=empty_statistics(work.kinds, step.variables),
        layer_gradients=zeros["layers"],
        embed_head_gradients=zeros["embed_head"],
        read_gradients=zeros["read"],
    )


def _ring(step: StepData, slots: int, like: Tree) -> Tree:
    """Return ring buffers of `slots` slots for a tree of shapes and dtypes."""
    return jax.tree.map(lambda leaf: buffers.make_ring(slots, leaf, poison=step.poison), like)
