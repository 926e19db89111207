"""Several steps in one program (`train.fused_steps`), which overlap as far as the schedule allows.

Every pipeline rank goes on with an unclipped update as soon as its own gradients are complete. The
norm over all ranks is known a little later (`overlap.py`). A step that must be
clipped, is not finite or has no target ends the overlap: its gradients get the update of a single
step, and the steps after it overlap again, from their beginning. Such a step costs what its overlap
with the next would have saved; no gradient of it is computed twice. The bits are those of single
steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpipe import optimizer as optimizers
from jaxpipe.config import TrainConfig
from jaxpipe.core.executor import Pipeline
from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.core.mesh.flags import choose
from jaxpipe.schedules import fuse_steps
from jaxpipe.training.fused.overlap import run_updates
from jaxpipe.training.state import State
from jaxpipe.training.step_guard import StepGuard
from jaxpipe.training.step_metrics import step_metrics
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

    @property
    def overlap(self) -> bool:
        """Whether steps overlap: not if every stage is on two pipeline ranks."""
        return self.trainer.schedule.placement.mirrored_from is None

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of overlapping steps."""
        one = self.trainer.pipeline
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
        return self.trainer.compiled(self._overlapping if self.overlap else self._in_turn)

    def are_one_overlap(self, metrics: dict[str, jax.Array]) -> bool:
        """Whether no step but the last ended the overlap, from the metrics of a program."""
        of_steps = metrics["loss"], metrics["grad_norm"], metrics["target_tokens"].sum(1)
        return bool(jax.vmap(self._accepts)(*of_steps)[:-1].all())

    def _overlapping(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        self.trainer.sharder.check_numbered(batch, trains=True)
        length, overlap = self.trainer.schedule.microbatches, jax.jit(self._overlap)

        def after(loop: tuple[jax.Array, State, Tree]) -> tuple[jax.Array, State, Tree]:
            first, state, metrics = loop
            rest = jax.tree.map(lambda leaf: jnp.roll(leaf, -first * length, 0), batch)
            steps, state, found = overlap(state, rest, self.count - first)
            write = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            return first + steps, state, jax.tree.map(write, metrics, found)

        # An overlap writes N rows from its first step on; the next overwrites those of its own.
        found = jax.eval_shape(overlap, state, batch, jnp.int32(self.count))[2]
        rows = lambda of: jnp.zeros((2 * self.count, *of.shape[1:]), of.dtype)  # noqa: E731
        metrics = jax.tree.map(rows, found)
        _, state, metrics = lax.while_loop(
            lambda loop: loop[0] < self.count, after, (jnp.int32(0), state, metrics)
        )
        return state, jax.tree.map(lambda leaf: leaf[: self.count], metrics)

    def _overlap(
        self, state: State, batch: Tree, most: jax.Array
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        """Run at most `most` steps, up to the first whose update is not the unclipped one.

        Returns:
          The number of steps that were run, the state after them, and the metrics of N steps.
        """
        trainer, train = self.trainer, self.trainer.config.train
        most = jnp.where(state.guard.stops(train), 1, most)  # a run that has stopped has no update
        outputs = run_updates(
            self.pipeline, state.params, state.optimizer, batch, most, self._update, self._accepts,
            state.variables,
        )  # fmt: skip
        last, of_steps = outputs.updates, (outputs.losses, outputs.counts, outputs.aux_losses)
        of_steps = jax.tree.map(lambda a: a.reshape(self.count, -1, *a.shape[1:]), of_steps)

        def account(guard: StepGuard, of_step: tuple) -> tuple[StepGuard, dict[str, jax.Array]]:
            number, square, losses, aux = of_step
            loss, norm = trainer.first_loss(losses[0]), jnp.sqrt(square)
            metrics = step_metrics(loss, norm, aux, trainer.model.functions.report)
            after, _ = guard.after(loss, norm, train)
            guard = choose(number < last, after, guard)
            return guard, metrics | guard.metrics() | trainer.losses_of(*losses)

        numbered = jnp.arange(self.count), outputs.squares, of_steps, outputs.aux
        guard, metrics = lax.scan(account, state.guard, numbered)
        step, variables = state.step + last, outputs.variables
        state = State(outputs.params, outputs.moments, step, variables, guard)
        (losses, counts, aux_losses), aux = jax.tree.map(
            lambda leaf: leaf[last], (of_steps, outputs.aux)
        )
        complete = StepOutput(losses, outputs.gradients, aux, None, counts, aux_losses)
        state, own = trainer.after(state, complete)
        return last + 1, state, jax.tree.map(lambda a, of: a.at[last].set(of), metrics, own)

    def _in_turn(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        by_step = jax.tree.map(lambda leaf: leaf.reshape(self.count, -1, *leaf.shape[1:]), batch)
        return lax.scan(self.trainer.step, state, by_step)

    def _update(
        self, gradients: Tree, moments: Tree, params: Tree, accepted: jax.Array
    ) -> tuple[Tree, Tree]:
        """The update of `Trainer.update` for gradients that are not clipped."""
        limit, norm = self.trainer.config.optimizer.clip_norm, jnp.float32(0)
        gradients = optimizers.clip_by_global_norm(gradients, norm, limit)
        return optimizers.apply(self._optimizer, gradients, moments, params, accepted)

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        """The run's optimizer, of a device's shards: their shapes tell not what parameters are."""
        trainer = self.trainer
        known = trainer.sharding.param_shardings(trainer.state_shapes.params)
        by_path = dict(jax.tree_util.tree_leaves_with_path(known))

        def stored(tree: Tree) -> Tree:
            return jax.tree_util.tree_map_with_path(lambda path, _: by_path[path], tree)

        return optimizers.build(trainer.config.optimizer, trainer.config.train.steps, stored)

    def _accepts(self, losses: jax.Array, norm: jax.Array, terms: jax.Array) -> jax.Array:
        """Whether `_update` is the update of a step; in doubt it is not."""
        limit = self.trainer.config.optimizer.clip_norm or _MOST
        return jnp.isfinite(losses).all() & (norm < limit * (1 - _MARGIN)) & (terms > 0)
