"""Optimizers on parameters in stage form, the learning rate over time, and clipping by norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpipe.config import OptimizerConfig
from jaxpipe.parallel import Stored

Tree = Any
_AT_ONCE = 2  # leaves of Muon: one is gathered while another is multiplied
Stores = Callable[[Tree], Tree]  # of a tree in stage form, `Stored` of every leaf


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of update `count` (0 is the first) in a run of `steps` updates.

    Linear warm-up reaches `lr` with update `warmup_steps - 1`; the first update is
    `lr / warmup_steps`, not 0. The decay ends at `lr * min_lr_ratio` with the last update. `wsd`
    holds `lr` and decays linearly in the last `wsd_decay_fraction` of the run, `wsd_sqrt` there as
    1 - sqrt(p) of the share p that is over (Hägele et al. 2024, "1-sqrt"). `rex` falls as
    (1 - p) / (1 - p / 2) (Chen et al. 2021, "REX"). `inverse_sqrt` falls as sqrt(w / (w + t)), t
    updates after w of warm-up or else one (Vaswani et al. 2017, equation 3), not below that end.
    """
    peak, floor, warmup = config.lr, config.lr * config.min_lr_ratio, config.warmup_steps
    rest = max(steps - 1 - warmup, 1)
    last = min(max(round(config.wsd_decay_fraction * steps), 1), rest)

    def falling(shape: Callable[[jax.Array], jax.Array], length: int) -> optax.Schedule:
        """From the peak to the floor by a shape from 1 to 0, in the last `length` updates."""
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
    share = first / (first + jnp.maximum(count, 0))  # it is also asked for updates of warm-up
    return jnp.maximum(peak * jnp.sqrt(share), floor)


def build(config: OptimizerConfig, steps: int, stored: Stores) -> optax.GradientTransformation:
    """The configured optimizer without clipping; weight decay is decoupled and scaled by the rate.

    AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023), or Muon (Jordan et al. 2024) on the
    layers' matrices, its updates scaled to the size of Adam's (Liu et al. 2025, "Muon is scalable",
    equation 4), and Adam on all else; or schedule-free AdamW (Defazio et al. 2024), whose beta1
    weighs an average of what its updates make. `stored` says of a tree in stage form how its leaves
    are stored (`Sharding.stored`): which are matrices, and along which dims.
    """
    betas = {"b1": config.beta1, "b2": config.beta2}
    rate, decay = learning_rate(config, steps), _decay(config, stored)
    scaled = optax.scale_by_learning_rate(rate)
    match config.name:
        case "adamw":
            core = optax.scale_by_adam(**betas, eps=config.eps)
        case "lion":
            core = optax.scale_by_lion(**betas)
        case "muon":
            adam = optax.scale_by_adam(**betas, eps=config.eps)
            core = optax.partition(
                {"muon": _muon(config, stored), "adam": adam},
                lambda params: jax.tree.map(_muon_or_adam, groups(params, stored)),
            )
            if config.muon_lr:
                decay = optax.chain(decay, _muons_rate(config, stored))
        case "schedule_free":
            square = optax.scale_by_rms(
                config.beta2, config.eps, eps_in_sqrt=False, bias_correction=True
            )
            # It counts updates from 1.
            return optax.contrib.schedule_free(
                optax.chain(square, decay, scaled), lambda count: rate(count - 1), config.beta1
            )
    return optax.chain(core, decay, scaled)


def averaged(config: OptimizerConfig, moments: Tree, params: Tree) -> Tree:
    """The parameters to evaluate: those that are trained, but the average of schedule-free AdamW's.

    `moments` are the state of what `build` makes.
    """
    if config.name != "schedule_free":
        return params
    return optax.contrib.schedule_free_eval_params(moments, params)


def _decay(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """Adds to every update its group's weight decay times the parameter."""
    rates = {
        "matrix": config.weight_decay,
        "end": config.weight_decay * config.decay_of_ends,
        "vector": config.weight_decay * config.decay_of_vectors,
    }

    def add(updates: Tree, params: Tree) -> Tree:
        return jax.tree.map(
            lambda update, leaf, group: update + rates[group] * leaf if rates[group] else update,
            updates, params, groups(params, stored),
        )  # fmt: skip

    return optax.stateless(add)


def groups(params: Tree, stored: Stores) -> Tree:
    """Every leaf's group: `matrix` of a layer, `end` (embedding, head), or `vector` (gains)."""

    def group(matrices: str, how: Stored) -> str:
        return "vector" if how.leaf.matrix is None else matrices

    names = {"shared": "end", "layers": "matrix"}
    return {
        part: jax.tree.map(partial(group, names[part]), leaves)
        for part, leaves in stored(params).items()
    }


def _muon(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """Muon on the layers' leaves `[P, ...]`: each matrix in them is made orthogonal by itself.

    Zeros at the end of a dim stay zeros, and change nothing but the shape.
    """

    def dims(how: Stored) -> optax.contrib.MuonDimensionNumbers:
        rows, columns = how.leaf.matrix
        return optax.contrib.MuonDimensionNumbers(1 + rows, 1 + columns)

    def orthogonal(tree: Tree) -> optax.GradientTransformation:
        return optax.contrib.scale_by_muon(
            beta=config.muon_momentum, weight_dimension_numbers=jax.tree.map(dims, tree)
        )

    def in_turn(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """As optax's, but a leaf's begins once that of the leaf `_AT_ONCE` before it is made.

        XLA may else begin all at once, and hold what each needs beside the state.
        """
        (leaves, tree), made = jax.tree.flatten(updates), []
        hows = tree.flatten_up_to(stored(updates))
        for at, (leaf, moment, how) in enumerate(zip(leaves, tree.flatten_up_to(state.mu), hows)):
            if at >= _AT_ONCE:  # both are read behind it, else XLA leaves one out
                before = at - _AT_ONCE
                leaf, made[before] = lax.optimization_barrier((leaf, made[before]))
            made.append(orthogonal(how).update(leaf, state._replace(mu=moment))[0])
        # Moments wait for no leaf: they are asked for alone, too, and then no matrix is made.
        return tree.unflatten(made), orthogonal(stored(updates)).update(updates, state)[1]

    def scale(update: jax.Array, how: Stored) -> jax.Array:
        shape = how.true_shape(update.shape)
        return update * (0.2 * max(shape[1 + dim] for dim in how.leaf.matrix) ** 0.5)

    sized = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, stored(updates)))
    made = optax.GradientTransformation(optax.contrib.scale_by_muon().init, in_turn)
    return optax.chain(made, sized)


def _muons_rate(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """Muon's updates, decay included, times what makes `muon_lr` of the learning rate `lr`."""
    ratio = config.muon_lr / config.lr

    def scale(updates: Tree, _: Tree) -> Tree:
        return jax.tree.map(
            lambda update, group: update * ratio if group == "matrix" else update,
            updates, groups(updates, stored),
        )  # fmt: skip

    return optax.stateless(scale)


def _muon_or_adam(group: str) -> str:
    return "muon" if group == "matrix" else "adam"


def apply(
    optimizer: optax.GradientTransformation, gradients: Tree, moments: Tree, params: Tree,
    finite: jax.Array,
) -> tuple[Tree, Tree]:  # fmt: skip
    """Parameters and moments after an update, or as they were if it is not `finite`.

    The moments come last, from gradients that wait for the parameters: nothing then reads an old
    moment once its successor is written, and XLA overwrites the state in place. On CPU it would
    else copy all of it first (jax 0.12, 16 million parameters: 120 ms, not 60).
    """
    updates, _ = optimizer.update(gradients, moments, params)
    made = chosen(finite, optax.apply_updates(params, updates), params)
    gradients, made = lax.optimization_barrier((gradients, made))
    _, after = optimizer.update(gradients, moments, params)
    return made, chosen(finite, after, moments)


def chosen(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """The new tree where the step is finite, else the old one."""
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


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
