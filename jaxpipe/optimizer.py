"""AdamW on parameters in stage form, its learning rate over time, and clipping by global norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe.config import OptimizerConfig

Tree = Any


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update `count` (0 is the first) in a run of `steps` updates.

    Linear warm-up reaches `lr` with update `warmup_steps - 1`; the first update is
    `lr / warmup_steps`, not 0. The decay ends at `lr * min_lr_ratio` with the last update. `wsd`
    holds `lr` and decays linearly in the last `wsd_decay_fraction` of the run.
    """
    peak, floor, warmup = config.lr, config.lr * config.min_lr_ratio, config.warmup_steps
    rest = max(steps - 1 - warmup, 1)
    match config.decay:
        case "constant":
            after = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, floor, rest)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=config.min_lr_ratio)
        case "wsd":
            decay = min(max(round(config.wsd_decay_fraction * steps), 1), rest)
            after = optax.linear_schedule(peak, floor, decay, rest - decay)
    if not warmup:
        return after
    rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rising, after], [warmup])


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only; without clipping."""
    return optax.adamw(
        learning_rate(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
    )


def decays(params: Tree) -> Tree:
    """Which leaves are matrices: in stage form layers have a leading rank axis, shared do not."""
    return {
        "shared": jax.tree.map(lambda leaf: leaf.ndim >= 2, params["shared"]),
        "layers": jax.tree.map(lambda leaf: leaf.ndim >= 3, params["layers"]),
    }


def global_norm(gradients: Tree) -> jax.Array:
    """Euclidean norm over all leaves, in float32 or wider.

    Leaves are global arrays, so each parameter counts once however it is stored.
    """
    wide = [
        leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        for leaf in jax.tree.leaves(gradients)
    ]
    return optax.tree.norm(wide)


def clip_by_global_norm(gradients: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """Gradients scaled so that their norm, now `norm`, is at most `max_norm`; 0 is no limit."""
    if not max_norm:
        return gradients
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), gradients)
