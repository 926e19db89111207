"""Optimizers on stage-stacked parameters, learning-rate schedules, and clipping by norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpipe.config import OptimizerConfig
from jaxpipe.parallel import ParamSharding
from jaxpipe.parallel.flags import is_trained, merge, select

Tree = Any
_AT_ONCE = 2  # parameters that Muon handles at once: one is gathered while another is multiplied
Stores = Callable[[Tree], Tree]  # a stage-stacked tree to the `ParamSharding` of every leaf


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


def build(config: OptimizerConfig, steps: int, stored: Stores) -> optax.GradientTransformation:
    """The configured optimizer, without clipping.

    Weight decay is decoupled and multiplied by the learning rate. The optimizers are AdamW
    (Loshchilov and Hutter 2019), Lion (Chen et al. 2023), Muon (Jordan et al. 2024) and
    schedule-free AdamW (Defazio et al. 2024), whose beta1 weighs the average of the iterates. Muon
    applies to the layers' matrices, with updates scaled to the size of Adam's (Liu et al. 2025,
    "Muon is scalable", equation 4); Adam applies to all other parameters.

    Args:
      config: the section `[optimizer]`.
      steps: updates in the run.
      stored: `Sharding.param_shardings`; it tells which parameters are matrices, and their dims.
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
            # optax's schedule-free counts updates from 1.
            return optax.contrib.schedule_free(
                optax.chain(square, decay, scaled), lambda count: rate(count - 1), config.beta1
            )
    return optax.chain(core, decay, scaled)


def of_trained(inner: optax.GradientTransformation, stored: Stores) -> optax.GradientTransformation:
    """The optimizer with state and updates of trained parameters alone; None for frozen ones."""

    def trained(params: Tree) -> Tree:
        return select(is_trained(stored(params)), params)

    return optax.GradientTransformation(
        lambda params: inner.init(trained(params)),
        lambda gradients, state, params: inner.update(gradients, state, trained(params)),
    )


def averaged(config: OptimizerConfig, moments: Tree, params: Tree) -> Tree:
    """The parameters to evaluate: `params`, or their average with schedule-free AdamW.

    `moments` is the state of the optimizer from `build`.
    """
    if config.name != "schedule_free":
        return params
    trained = jax.tree.map(lambda leaf, z: z is not None, params, moments.z)
    made = optax.contrib.schedule_free_eval_params(moments, select(trained, params))
    return merge(trained, made, params)


def _decay(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """A transformation that adds each group's weight decay times the parameter to the update."""
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
    """The group of every parameter: `matrix` (in layers), `end` (embedding, head) or `vector`."""

    def group(matrices: str, how: ParamSharding) -> str:
        return "vector" if how.param.matrix is None else matrices

    names = {"embed_head": "end", "layers": "matrix"}
    return {
        part: jax.tree.map(partial(group, names[part]), leaves)
        for part, leaves in stored(params).items()
    }


def _muon(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """Muon on the layers' parameters `[P, ...]`; each matrix is orthogonalised by itself.

    Padding with zeros stays zero and does not change the result.
    """

    def dims(how: ParamSharding) -> optax.contrib.MuonDimensionNumbers:
        rows, columns = how.param.matrix
        return optax.contrib.MuonDimensionNumbers(1 + rows, 1 + columns)

    def orthogonal(tree: Tree) -> optax.GradientTransformation:
        return optax.contrib.scale_by_muon(
            beta=config.muon_momentum, weight_dimension_numbers=jax.tree.map(dims, tree)
        )

    def in_turn(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """optax's update, but each parameter waits for the one `_AT_ONCE` positions before.

        Otherwise XLA may start all parameters at once, and the temporary arrays of all are live.
        """
        (leaves, tree), made = jax.tree.flatten(updates), []
        hows = tree.flatten_up_to(stored(updates))
        for at, (leaf, moment, how) in enumerate(zip(leaves, tree.flatten_up_to(state.mu), hows)):
            if at >= _AT_ONCE:  # both results must be read, or XLA drops one from the barrier
                before = at - _AT_ONCE
                leaf, made[before] = lax.optimization_barrier((leaf, made[before]))
            made.append(orthogonal(how).update(leaf, state._replace(mu=moment))[0])
        # The moments use no barrier: `apply` also computes them alone, and XLA then removes the
        # orthogonalisation.
        return tree.unflatten(made), orthogonal(stored(updates)).update(updates, state)[1]

    def scale(update: jax.Array, how: ParamSharding) -> jax.Array:
        shape = how.unpadded_shape(update.shape)
        return update * (0.2 * max(shape[1 + dim] for dim in how.param.matrix) ** 0.5)

    sized = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, stored(updates)))
    made = optax.GradientTransformation(optax.contrib.scale_by_muon().init, in_turn)
    return optax.chain(made, sized)


def _muons_rate(config: OptimizerConfig, stored: Stores) -> optax.GradientTransformation:
    """A transformation that scales Muon's updates, weight decay included, by `muon_lr / lr`."""
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
    """Parameters and moments after an update, unchanged if `finite` (a bool array) is False.

    A barrier makes the new moments wait for the new parameters. No operation then reads an old
    moment after the new one is written, so XLA updates the state in place. Without the barrier XLA
    on CPU copies the full state first (jax 0.12, 16 million parameters: 120 ms instead of 60).
    Another barrier hides from XLA how `finite` is computed, so that the update rounds alike in
    every program that contains it.
    """
    finite = lax.optimization_barrier(finite)
    updates, _ = optimizer.update(gradients, moments, params)
    moved = lambda leaf, by: leaf if by is None else optax.apply_updates(leaf, by)  # noqa: E731
    made = chosen(finite, jax.tree.map(moved, params, updates), params)
    gradients, made = lax.optimization_barrier((gradients, made))
    _, after = optimizer.update(gradients, moments, params)
    return made, chosen(finite, after, moments)


def chosen(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """The tree `new` if the scalar `finite` is True, otherwise `old`."""
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def global_norm(gradients: Tree) -> jax.Array:
    """The Euclidean norm over all leaves, in float32 or wider.

    Leaves are global arrays, so each gradient counts once, however it is sharded or replicated.
    """
    wide = [
        leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        for leaf in jax.tree.leaves(gradients)
    ]
    return optax.tree.norm(wide)


def clip_by_global_norm(gradients: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """Scale gradients of norm `norm` so that their norm is at most `max_norm`; 0: no limit.

    A barrier hides from XLA how `norm` is computed (see `apply`).
    """
    if not max_norm:
        return gradients
    norm = lax.optimization_barrier(norm)
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), gradients)
