"""Several steps in one program (`train.fused_steps`), which overlap as far as the schedule allows.

Every pipeline rank updates with unclipped gradients as soon as its own are complete. Afterwards the
steps are validated together, because their norms over all ranks are known only then
(post-validation: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4). If all norms are
finite and too small to clip, the result is bitwise that of the same steps one by one. Otherwise the
steps run again one by one from the previous state, which is kept until then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe import optimizer as optimizers
from jaxpipe.config import TrainConfig
from jaxpipe.pipeline import Aux, Pipeline
from jaxpipe.schedule import fuse_steps
from jaxpipe.training.rates import step_metrics
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
_MARGIN = 1e-3  # relative, below the limit: another summation order changes a norm by less
_MOST = jnp.finfo(jnp.float32).max ** 0.5  # the largest norm whose square is finite


def programs(train: TrainConfig, done: int) -> Iterator[range]:
    """Yield the numbers of the steps of each program of a run, after `done` steps.

    A program has `train.fused_steps` steps if the number of steps before it is a multiple of that
    and at least as many are left; otherwise it has one step.

    >>> train = TrainConfig(steps=7, fused_steps=2, microbatch_size=1, seq_len=8)
    >>> [list(program) for program in programs(train, done=1)]
    [[2], [3, 4], [5, 6], [7]]
    """
    while done < train.steps:
        fused = train.fused_steps
        count = fused if done % fused == 0 and done + fused <= train.steps else 1
        yield range(done + 1, done + count + 1)
        done += count


def round_to_programs(train: TrainConfig, steps: range) -> range:
    """Return the steps of all programs that contain one of `steps`.

    >>> train = TrainConfig(steps=20, fused_steps=4, microbatch_size=1, seq_len=8)
    >>> round_to_programs(train, range(7, 10))
    range(5, 13)
    """
    before, fused = steps.start - 1, train.fused_steps
    last = -(-(steps.stop - 1) // fused) * fused
    return range(before // fused * fused + 1, last + 1)


@dataclass(frozen=True)
class FusedSteps:
    """Runs `train.fused_steps` steps of a trainer in one program."""

    trainer: Trainer

    @property
    def count(self) -> int:
        """Number of steps in the program."""
        return self.trainer.config.train.fused_steps

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the overlapping steps; None if every stage is on two pipeline ranks."""
        one = self.trainer.pipeline
        if one.schedule.placement.mirrored_from is not None:
            return None
        # The update of a stage already reduces its gradients over the replicas.
        how = replace(one.execution, overlap_sums=False)
        return replace(one, schedule=fuse_steps(one.schedule, self.count), execution=how)

    @cached_property
    def train_steps(self) -> Any:
        """Compiled `(state, batch) -> (state, metrics)`; the state is donated.

        The batch holds the microbatches of the N steps in order, `[N M, B, L]`. The result equals
        that of N calls of `Trainer.train_step`, with metrics stacked, `[N]`; only `grad_norm` is
        summed in another order.
        """
        return self.trainer.compiled(self._in_turn if self.pipeline is None else self._overlapping)

    def _overlapping(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        config = self.trainer.config
        outputs = self.pipeline.run_updates(state.params, state.optimizer, batch, self._update)
        of_steps = outputs.losses, outputs.counts, outputs.aux_losses
        of_steps = jax.tree.map(lambda a: a.reshape(self.count, -1, *a.shape[1:]), of_steps)
        has_targets = (of_steps[1] > 0).any(1).all()
        norms = jnp.sqrt(outputs.squares)
        goes_on = ~state.guard.stops(config.train)
        most = (config.optimizer.clip_norm or _MOST) * (1 - _MARGIN)
        metrics = [
            self._metrics_of(*jax.tree.map(lambda a, n=n: a[n], (norms, *of_steps)))
            for n in range(self.count)
        ]
        metrics = jax.tree.map(lambda *of_each: jnp.stack(of_each), *metrics)
        valid = goes_on & has_targets & jnp.isfinite(metrics["loss"]).all() & (norms < most).all()

        def accept() -> tuple[State, dict[str, jax.Array]]:
            guard = state.guard
            for loss, norm in zip(metrics["loss"], norms):
                guard, _ = guard.after(loss, norm, config.train)
            more = {"skipped_steps": jnp.full(self.count, guard.skipped)}
            step = state.step + self.count
            after = State(outputs.params, outputs.moments, step, state.variables, guard)
            return after, metrics | more

        return lax.cond(valid, accept, lambda: self._in_turn(state, batch))

    def _in_turn(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        by_step = jax.tree.map(lambda leaf: leaf.reshape(self.count, -1, *leaf.shape[1:]), batch)
        return lax.scan(self.trainer.step, state, by_step)

    def _update(self, gradients: Tree, moments: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The update of `Trainer.update` for gradients that are finite and not clipped."""
        limit, norm = self.trainer.config.optimizer.clip_norm, jnp.float32(0)
        gradients = optimizers.clip_by_global_norm(gradients, norm, limit)
        return optimizers.apply(self.trainer.optimizer, gradients, moments, params, jnp.bool_(True))

    def _metrics_of(
        self, norm: jax.Array, losses: jax.Array, counts: jax.Array, aux_losses: jax.Array | None
    ) -> dict[str, jax.Array]:
        """The metrics of one step, as `Trainer.step` returns them."""
        loss, report = self.trainer.first_loss(losses), self.trainer.model.functions.report
        metrics = step_metrics(loss, norm, Aux(), report)
        return metrics | self.trainer.losses_of(losses, counts, aux_losses)
