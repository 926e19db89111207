"""Token cross-entropy as a sum and a count, so that microbatches add up exactly.

Shapes: B examples, L tokens, V vocabulary (this device's part of it, where devices share it).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.model.parts import own_entries
from jaxpipe.partition.devices import ONE_DEVICE, OneDevice

IGNORE = -100  # a target that counts for nothing


def cross_entropy_sum(
    logits_BLV: jax.Array, targets_BL: jax.Array, devices: OneDevice = ONE_DEVICE
) -> jax.Array:
    """Sum over the tokens that are not ignored of -log softmax(logits)[target], in nats.

    Computed in float32, or in the logits' own dtype if that is wider. Of devices that share the
    vocabulary each has the whole sum; only maxima, sums and the targets' logits are exchanged.
    """
    logits_BLV = logits_BLV.astype(jnp.promote_types(logits_BLV.dtype, jnp.float32))
    valid_BL = targets_BL != IGNORE
    own_BL, index_BL = own_entries(
        jnp.where(valid_BL, targets_BL, 0), logits_BLV.shape[-1], devices
    )
    picked_BL = jnp.take_along_axis(logits_BLV, index_BL[..., None], axis=-1)[..., 0]
    at_target_BL = devices.total(jnp.where(own_BL, picked_BL, 0))
    most_BL = devices.largest(jax.lax.stop_gradient(logits_BLV.max(-1)))
    exponentials_BL = jnp.exp(logits_BLV - most_BL[..., None]).sum(-1)
    logsumexp_BL = jnp.log(devices.total(exponentials_BL)) + most_BL
    return jnp.sum(jnp.where(valid_BL, logsumexp_BL - at_target_BL, 0))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def chunked_cross_entropy_sum(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    devices: OneDevice,
    chunks: int,
) -> jax.Array:
    """`cross_entropy_sum(x @ head, targets)`, never holding more than L / `chunks` rows of logits.

    The gradients are made together with the loss, chunk by chunk, since the loss is only ever
    scaled: each chunk's logits are computed once and dropped. Those of the head are summed in
    float32 or wider.
    """

    def one(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets = part
        return total + cross_entropy_sum(x @ head_DV, targets, devices), None

    parts = _cut(x_BLD, chunks), _cut(targets_BL, chunks)
    return jax.lax.scan(one, jnp.zeros((), _wide(x_BLD)), parts)[0]


def _forward(
    x_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array, devices: OneDevice, chunks: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy_sum(x @ head, targets, devices)

    def one(totals: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]) -> tuple:
        total, dhead = totals
        more, (dx, dmore) = jax.value_and_grad(loss, (0, 1))(part[0], head_DV, part[1])
        return (total + more, dhead + dmore), dx

    zeros = jnp.zeros((), _wide(x_BLD)), jnp.zeros(head_DV.shape, _wide(head_DV))
    parts = _cut(x_BLD, chunks), _cut(targets_BL, chunks)
    (total, dhead), dx = jax.lax.scan(one, zeros, parts)
    dx_BLD = jnp.moveaxis(dx, 0, 1).reshape(x_BLD.shape)
    return total, (dx_BLD, dhead.astype(head_DV.dtype))


def _backward(
    _: OneDevice, __: int, made: tuple[jax.Array, jax.Array], scale: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    dx, dhead = made
    return dx * scale.astype(dx.dtype), dhead * scale.astype(dhead.dtype), None


chunked_cross_entropy_sum.defvjp(_forward, _backward)


def _cut(values_BL: jax.Array, chunks: int) -> jax.Array:
    """`[B, L, ...]` to `[chunks, B, L / chunks, ...]`."""
    b, length, *rest = values_BL.shape
    return jnp.moveaxis(values_BL.reshape(b, chunks, length // chunks, *rest), 1, 0)


def _wide(values: jax.Array) -> jnp.dtype:
    return jnp.promote_types(values.dtype, jnp.float32)


def count_valid(targets_BL: jax.Array) -> jax.Array:
    """Number of targets that are not ignored."""
    return jnp.sum(targets_BL != IGNORE)
