"""Token cross-entropy as a sum and a count, so that microbatches add up exactly.

Shapes: B examples, L tokens, V vocabulary (this device's shard of it, where devices share it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.model.layers.parts import local_entries

IGNORE = -100  # target of tokens that the loss ignores


def softcap(logits: jax.Array, cap: float) -> jax.Array:
    """c tanh(logits / c) for the cap c; the logits themselves for a cap of 0.

    Gemma Team 2024, "Gemma 2", section 2 (logit soft-capping).

    >>> [round(float(softcap(jnp.float32(x), 2.0)), 3) for x in (0.1, 2.0, 100.0)]
    [0.1, 1.523, 2.0]
    """
    return cap * jnp.tanh(logits / cap) if cap else logits


def cross_entropy_sum(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    devices: OneDevice = ONE_DEVICE,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Sum over the tokens that are not ignored of -log softmax(logits)[target], in nats.

    Computed in float32, or in the logits' own dtype if that is wider. Where devices share the
    vocabulary, each returns the full sum; only maxima, sums and the targets' logits are exchanged.

    With `z_loss` the result is `[2]`: that sum, and the sum over the same tokens of z_loss *
    log(Z)^2, where Z is the sum of the exponentials of a token's logits. Training on it keeps Z
    near 1 (Chowdhery et al. 2022, PaLM, section 5).

    `vocabulary` is the size of the full vocabulary (None: that of all shards). Logits beyond it are
    padding, which neither counts nor has a gradient. `cap` bounds logits (`softcap`).
    """
    logits_BLV = _without_padding(softcap(_widened(logits_BLV), cap), devices, vocabulary)
    picked = _pick_targets(logits_BLV, targets_BL, devices)
    loss = jnp.sum(jnp.where(picked.valid_BL, picked.logsumexp_BL - picked.target_BL, 0))
    if not z_loss:
        return loss
    squares_BL = jnp.where(picked.valid_BL, picked.logsumexp_BL, 0) ** 2
    return jnp.stack([loss, z_loss * jnp.sum(squares_BL)])


CHOICES = "choices"  # batch key of K tokens at each position, whose log-probabilities are wanted


@dataclass(frozen=True)
class ScoreOptions:
    """What is computed of each position's logits.

    Attributes:
      temperature: T of the distribution softmax(logits / T), of which all scores are.
      entropy: whether to return its entropy.
      top: number of the most likely tokens to return; 0: none. They have no gradient.
    """

    temperature: float = 1.0
    entropy: bool = False
    top: int = 0


LOGPROBS = ScoreOptions()


class TokenScores(NamedTuple):
    """How likely each target is after the tokens before it, and what else was asked for.

    All are 0 at ignored targets, and logarithms are natural, in float32 or wider.

    Attributes:
      logprobs_BL: logarithm of the target's probability.
      greedy_BL: int32, 1 where no other token is more likely.
      entropy_BL: entropy of the distribution over the vocabulary, in nats.
      choice_logprobs_BLK: logarithms of the probabilities of the tokens `choices` of the batch.
      top_ids_BLK, top_logprobs_BLK: the K most likely tokens, the likeliest first.
    """

    logprobs_BL: jax.Array
    greedy_BL: jax.Array
    entropy_BL: jax.Array | None = None
    choice_logprobs_BLK: jax.Array | None = None
    top_ids_BLK: jax.Array | None = None
    top_logprobs_BLK: jax.Array | None = None


class _Picked(NamedTuple):
    """Logits `[B, L]` of the targets, and the largest and the log-sum-exp over the vocabulary."""

    target_BL: jax.Array
    largest_BL: jax.Array
    logsumexp_BL: jax.Array
    valid_BL: jax.Array  # bool: the target is not ignored


def score_targets(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    devices: OneDevice = ONE_DEVICE,
    vocabulary: int | None = None,
    cap: float = 0.0,
    options: ScoreOptions = LOGPROBS,
    choices_BLK: jax.Array | None = None,
) -> TokenScores:
    """Score each target, and `choices_BLK`; other arguments as those of `cross_entropy_sum`."""
    logits_BLV = softcap(_widened(logits_BLV), cap)
    if options.temperature != 1:
        logits_BLV = logits_BLV / options.temperature
    logits_BLV = _without_padding(logits_BLV, devices, vocabulary)
    picked = _pick_targets(logits_BLV, targets_BL, devices)
    valid_BL, logsumexp_BL = picked.valid_BL, picked.logsumexp_BL
    valid_BL1, logsumexp_BL1 = valid_BL[..., None], logsumexp_BL[..., None]
    logprobs_BL = jnp.where(valid_BL, picked.target_BL - logsumexp_BL, 0)
    greedy_BL = valid_BL & (picked.target_BL >= picked.largest_BL)
    entropy_BL = chosen_BLK = top_ids_BLK = top_BLK = None
    if options.entropy:
        entropy_BL = jnp.where(valid_BL, _entropy(logits_BLV, picked, devices), 0)
    if choices_BLK is not None:
        own_BLK, index_BLK = local_entries(choices_BLK, logits_BLV.shape[-1], devices)
        at_BLK = jnp.take_along_axis(logits_BLV, index_BLK, axis=-1)
        at_BLK = devices.total(jnp.where(own_BLK, at_BLK, 0))
        chosen_BLK = jnp.where(valid_BL1, at_BLK - logsumexp_BL1, 0)
    if options.top:
        top_BLK, top_ids_BLK = _most_likely(logits_BLV, options.top, devices)
        top_BLK = jnp.where(valid_BL1, top_BLK - logsumexp_BL1, 0)
        top_ids_BLK = jnp.where(valid_BL1, top_ids_BLK, 0)
    greedy_BL = greedy_BL.astype(jnp.int32)
    return TokenScores(logprobs_BL, greedy_BL, entropy_BL, chosen_BLK, top_ids_BLK, top_BLK)


def _entropy(logits_BLV: jax.Array, picked: _Picked, devices: OneDevice) -> jax.Array:
    """Entropy of softmax(logits), from sums over the vocabulary that all devices use alike."""
    above_BLV = logits_BLV - picked.largest_BL[..., None]
    above_BLV = jnp.where(jnp.isfinite(logits_BLV), above_BLV, 0)  # padding: 0 exp(-inf)
    exponentials_BLV = jnp.exp(logits_BLV - picked.largest_BL[..., None])
    weighted_BL = devices.total((exponentials_BLV * above_BLV).sum(-1))
    log_sum_BL = picked.logsumexp_BL - picked.largest_BL
    return log_sum_BL - weighted_BL * jnp.exp(-log_sum_BL)


def gather_shards(values: jax.Array, devices: OneDevice) -> jax.Array:
    """The shards `[..., X]` of all devices, side by side."""
    if devices.size == 1:
        return values
    width = values.shape[-1]
    zeros = jnp.zeros((*values.shape[:-1], width * devices.size), values.dtype)
    begin = devices.index() * width
    return devices.total(lax.dynamic_update_slice_in_dim(zeros, values, begin, axis=-1))


def _most_likely(
    logits_BLV: jax.Array, count: int, devices: OneDevice
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits over the devices' shards, and their tokens, without a gradient."""
    logits_BLV = lax.stop_gradient(logits_BLV)
    own = logits_BLV.shape[-1]
    some_BLK, ids_BLK = lax.top_k(logits_BLV, min(count, own))
    if devices.size == 1:
        return some_BLK, ids_BLK
    all_BLK = gather_shards(some_BLK, devices)
    all_ids_BLK = gather_shards(ids_BLK + devices.index() * own, devices)
    most_BLK, where_BLK = lax.top_k(all_BLK, count)
    return most_BLK, jnp.take_along_axis(all_ids_BLK, where_BLK, axis=-1)


def _widened(logits_BLV: jax.Array) -> jax.Array:
    return logits_BLV.astype(_to_float32(logits_BLV))


def _pick_targets(logits_BLV: jax.Array, targets_BL: jax.Array, devices: OneDevice) -> _Picked:
    valid_BL = targets_BL != IGNORE
    own_BL, index_BL = local_entries(
        jnp.where(valid_BL, targets_BL, 0), logits_BLV.shape[-1], devices
    )
    at_target_BL = devices.total(jnp.where(own_BL, _pick(logits_BLV, index_BL), 0))
    most_BL = devices.largest(lax.stop_gradient(logits_BLV.max(-1)))
    exponentials_BL = jnp.exp(logits_BLV - most_BL[..., None]).sum(-1)
    logsumexp_BL = jnp.log(devices.total(exponentials_BL)) + most_BL
    return _Picked(at_target_BL, most_BL, logsumexp_BL, valid_BL)


def _without_padding(
    logits_BLV: jax.Array, devices: OneDevice, vocabulary: int | None
) -> jax.Array:
    """Set the logits beyond the vocabulary to minus infinity."""
    own = logits_BLV.shape[-1]
    if vocabulary is None or own * devices.size == vocabulary:
        return logits_BLV
    entry_BLV = lax.broadcasted_iota(jnp.int32, logits_BLV.shape, logits_BLV.ndim - 1)
    return jnp.where(entry_BLV + devices.index() * own < vocabulary, logits_BLV, -jnp.inf)


@jax.custom_vjp
def _pick(logits_BLV: jax.Array, index_BL: jax.Array) -> jax.Array:
    """The logits at an index: `[B, L]`.

    The gradient compares indices. jax's own would be a scatter, for which XLA on GPUs keeps the
    gradient of all logits in float32; this one is an elementwise term of that gradient, with the
    same bits.
    """
    return jnp.take_along_axis(logits_BLV, index_BL[..., None], axis=-1)[..., 0]


def _picked_forward(logits_BLV: jax.Array, index_BL: jax.Array) -> tuple[jax.Array, Any]:
    return _pick(logits_BLV, index_BL), (jnp.zeros_like(logits_BLV), index_BL)


def _picked_backward(residuals: Any, gradient_BL: jax.Array) -> tuple[jax.Array, None]:
    zeros_BLV, index_BL = residuals
    entry_BLV = lax.broadcasted_iota(index_BL.dtype, zeros_BLV.shape, zeros_BLV.ndim - 1)
    return jnp.where(entry_BLV == index_BL[..., None], gradient_BL[..., None], zeros_BLV), None


_pick.defvjp(_picked_forward, _picked_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def chunked_cross_entropy_sum(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    devices: OneDevice,
    chunks: int,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """`cross_entropy_sum(x @ head, targets)`, with the logits of one chunk live at a time.

    A chunk has L / `chunks` of the tokens. The gradients are computed together with the loss, chunk
    by chunk, so that each chunk's logits are computed once and dropped. This is possible because
    the losses are only ever scaled afterwards, both by the same factor. The head's gradient is
    summed in float32 or wider.
    """

    def one(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, targets = part
        own = cross_entropy_sum(x @ head_DV, targets, devices, z_loss, vocabulary, cap)
        return total + own, None

    parts = _split_chunks(x_BLD, chunks), _split_chunks(targets_BL, chunks)
    return lax.scan(one, _no_loss(x_BLD, z_loss), parts)[0]


def _forward(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    devices: OneDevice,
    chunks: int,
    z_loss: float,
    vocabulary: int | None,
    cap: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def loss(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses = cross_entropy_sum(logits, targets, devices, z_loss, vocabulary, cap)
        return losses.sum(), losses

    def one(totals: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]) -> tuple:
        (total, dhead), (x, targets) = totals, part
        dlogits, more = jax.grad(loss, has_aux=True)(x @ head_DV, targets)
        dmore = jnp.einsum("bld,blv->dv", x, dlogits, preferred_element_type=dhead.dtype)
        return (total + more, dhead + dmore), dlogits @ head_DV.T

    zeros = _no_loss(x_BLD, z_loss), jnp.zeros(head_DV.shape, _to_float32(head_DV))
    parts = _split_chunks(x_BLD, chunks), _split_chunks(targets_BL, chunks)
    (total, dhead), dx = lax.scan(one, zeros, parts)
    dx_BLD = jnp.moveaxis(dx, 0, 1).reshape(x_BLD.shape)
    return total, (dx_BLD, dhead)


def _backward(
    _: OneDevice,
    __: int,
    z_loss: float,
    ___: int | None,
    ____: float,
    made: tuple[jax.Array, jax.Array],
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    dx, dhead = made
    scale = scale[0] if z_loss else scale  # in float32: 16 bits would round all gradients alike
    return (dx * scale).astype(dx.dtype), (dhead * scale).astype(dx.dtype), None


chunked_cross_entropy_sum.defvjp(_forward, _backward)


def map_chunks(function: Callable[..., Any], arrays: tuple[jax.Array, ...], chunks: int) -> Any:
    """Apply a function of arrays `[B, L, ...]` to `chunks` equal parts of L, one after the other.

    Returns its tree of results `[B, L, ...]`.
    """
    if chunks == 1:
        return function(*arrays)
    parts = tuple(_split_chunks(array, chunks) for array in arrays)
    return jax.tree.map(_join_chunks, lax.map(lambda part: function(*part), parts))


def _join_chunks(parts: jax.Array) -> jax.Array:
    """Undo `_split_chunks`."""
    chunks, b, length, *rest = parts.shape
    return jnp.moveaxis(parts, 0, 1).reshape(b, chunks * length, *rest)


def _split_chunks(values_BL: jax.Array, chunks: int) -> jax.Array:
    """`[B, L, ...]` to `[chunks, B, L / chunks, ...]`."""
    b, length, *rest = values_BL.shape
    return jnp.moveaxis(values_BL.reshape(b, chunks, length // chunks, *rest), 1, 0)


def _no_loss(x_BLD: jax.Array, z_loss: float) -> jax.Array:
    """Zeros from which sums of losses start."""
    return jnp.zeros((2,) if z_loss else (), _to_float32(x_BLD))


def _to_float32(values: jax.Array) -> jnp.dtype:
    return jnp.promote_types(values.dtype, jnp.float32)


def count_valid(targets_BL: jax.Array) -> jax.Array:
    """Number of targets that are not ignored."""
    return jnp.sum(targets_BL != IGNORE)
