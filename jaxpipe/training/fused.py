"""Several steps in one program (`train.fused_steps`), which overlap where the schedule lets them.

Updates are made of gradients as they are, on every rank when its own are whole. Afterwards the
steps are validated together (post-validation: Qi et al. 2024, "Zero Bubble Pipeline Parallelism",
section 5): the norms of all are known only then. If each is finite and so small that nothing is
clipped, what the updates made is what the same steps in turn make, to the bit. Else they are made
in turn, from the state before, which is kept until then.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline import Pipeline, Side
from jaxpipe.schedule import fused
from jaxpipe.training import optimizer as optimizers
from jaxpipe.training.rates import step_metrics
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
_MARGIN = 1e-3  # of the limit: norms that are summed in another order never differ by so much
_MOST = jnp.finfo(jnp.float32).max ** 0.5  # norms whose square is finite


@dataclass(frozen=True)
class FusedSteps:
    """The steps of a trainer, so many at once as `train.fused_steps` says."""

    trainer: Trainer

    @property
    def count(self) -> int:
        """How many."""
        return self.trainer.config.train.fused_steps

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """What runs them if they overlap; None where every stage is on two ranks."""
        one = self.trainer.pipeline
        if one.schedule.placement.mirrored_from is not None:
            return None
        # Sums over replicas are made in the update.
        how = replace(one.execution, overlap_sums=False)
        return replace(one, schedule=fused(one.schedule, self.count), execution=how)

    @cached_property
    def train_steps(self) -> Any:
        """Compiled `(state, batch) -> (state, metrics)`; the state is given up to it.

        The batch has the microbatches of the steps in turn, `[N M, B, L]`. State and metrics are
        those of `Trainer.train_step` after so many calls, metrics stacked, `[N]`; but `grad_norm`
        is summed in another order.
        """
        return self.trainer.compiled(self._in_turn if self.pipeline is None else self._overlapping)

    def _overlapping(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        config = self.trainer.config
        # Numbers that only the devices know: of a norm and a truth that it knows XLA would make
        # another update, whose products and sums are rounded otherwise.
        known = {"norm": jnp.where(state.step < 0, 1.0, 0.0), "finite": state.step >= 0}
        before = {"moments": state.optimizer, **known}
        made = self.pipeline.updated(state.params, before, batch, self._update)
        of_steps = made.losses, made.counts, made.aux_losses
        of_steps = jax.tree.map(lambda a: a.reshape(self.count, -1, *a.shape[1:]), of_steps)
        has_targets = (of_steps[1] > 0).any(1).all()
        norms = jnp.sqrt(made.squares)
        goes_on = state.guard.in_row <= config.train.skip_non_finite
        most = (config.optimizer.clip_norm or _MOST) * (1 - _MARGIN)
        metrics = [
            self._metrics_of(*jax.tree.map(lambda a, n=n: a[n], (norms, *of_steps)))
            for n in range(self.count)
        ]
        metrics = jax.tree.map(lambda *of_each: jnp.stack(of_each), *metrics)
        valid = goes_on & has_targets & jnp.isfinite(metrics["loss"]).all() & (norms < most).all()

        def taken() -> tuple[State, dict[str, jax.Array]]:
            guard = state.guard
            for _ in range(self.count):
                guard, _ = guard.after(jnp.bool_(True), config.train.skip_non_finite)
            more = {"skipped_steps": jnp.full(self.count, guard.skipped)}
            step = state.step + self.count
            after = State(made.params, made.moments["moments"], step, state.variables, guard)
            return after, metrics | more

        return lax.cond(valid, taken, lambda: self._in_turn(state, batch))

    def _in_turn(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        by_step = jax.tree.map(lambda leaf: leaf.reshape(self.count, -1, *leaf.shape[1:]), batch)
        return lax.scan(self.trainer.step, state, by_step)

    def _update(self, gradients: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
        """As `Trainer.update` makes it of gradients that are finite and not clipped."""
        limit = self.trainer.config.optimizer.clip_norm
        gradients = optimizers.clip_by_global_norm(gradients, before["norm"], limit)
        params, moments = optimizers.apply(
            self.trainer.optimizer, gradients, before["moments"], params, before["finite"]
        )
        return params, before | {"moments": moments}

    def _metrics_of(
        self, norm: jax.Array, losses: jax.Array, counts: jax.Array, aux_losses: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Those of a step, as `Trainer.step` has them."""
        loss, report = self.trainer.first_loss(losses), self.trainer.model.functions.report
        metrics = step_metrics(loss, norm, Side(), report)
        return metrics | self.trainer.losses_of(losses, counts, aux_losses)
