"""Learning rates over a run."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxpipe.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates before, in a run of `steps` updates.

    Linear warm-up starts at `lr / warmup_steps`, not 0, and reaches `lr` at update
    `warmup_steps - 1`. The decay reaches `lr * min_lr_ratio` at the last update. `wsd` keeps `lr`
    and decays linearly in the last `wsd_decay_fraction` of the run; `wsd_sqrt` decays as
    1 - sqrt(p), where p is the elapsed fraction of the decay (Hägele et al. 2024, "1-sqrt"). `rex`
    decays as (1 - p) / (1 - p / 2) (Chen et al. 2021, "REX"). `inverse_sqrt` decays as
    sqrt(w / (w + t)) at t updates after warm-up with w = max(`warmup_steps`, 1) (Vaswani et al.
    2017, equation 3), but not below `lr * min_lr_ratio`.
    """
    peak, floor, warmup = config.lr, config.lr * config.min_lr_ratio, config.warmup_steps
    rest = max(steps - 1 - warmup, 1)
    last = min(max(round(config.wsd_decay_fraction * steps), 1), rest)

    def falling(shape: Callable[[jax.Array], jax.Array], length: int) -> optax.Schedule:
        """Fall from peak to floor in the last `length` updates, by a shape from 1 to 0."""
        share = lambda count: jnp.clip((count - rest + length) / length, 0, 1)  # noqa: E731
        return lambda count: floor + (peak - floor) * shape(share(count))

    match config.decay:
        case "constant":
            after = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, floor, rest)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, rest, alpha=config.min_lr_ratio)
        case "wsd":
            after = optax.linear_schedule(peak, floor, last, rest - last)
        case "wsd_sqrt":
            after = falling(lambda share: 1 - jnp.sqrt(share), last)
        case "rex":
            after = falling(lambda share: (1 - share) / (1 - share / 2), rest)
        case "inverse_sqrt":
            after = partial(_inverse_sqrt, peak, floor, max(warmup, 1))
    if not warmup:
        return after
    rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rising, after], [warmup])


def _inverse_sqrt(peak: float, floor: float, first: int, count: jax.Array) -> jax.Array:
    share = first / (first + jnp.maximum(count, 0))  # join_schedules evaluates it in warm-up too
    return jnp.maximum(peak * jnp.sqrt(share), floor)
