"""State for non-finite steps: counts of skipped steps, and the loss scale of float16."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.config import TrainConfig

_FIRST_SCALE = 2.0**15
_PERIOD = 2000  # consecutive finite updates after which the loss scale doubles


class Guard(NamedTuple):
    """Decides whether a step with a non-finite loss or gradient is skipped or stops the run.

    A step without any target is always skipped.

    Attributes:
      in_row: int32, consecutive non-finite steps; finite steps without targets do not reset it. The
        run stops when it exceeds `train.skip_non_finite`, and no later step changes the state.
      skipped: int32, steps without an update in the run so far.
      finite_steps: int32, consecutive finite updates since the loss scale last changed.
      loss_scale: float32, factor of the mean loss in the backward pass, if float16 is used and
        steps may be skipped; otherwise None. A non-finite step halves it, and 2000 consecutive
        finite updates double it (Micikevicius et al. 2018, "Mixed precision training", section
        3.2).
    """

    in_row: jax.Array
    skipped: jax.Array
    finite_steps: jax.Array
    loss_scale: jax.Array | None

    @classmethod
    def fresh(cls, train: TrainConfig) -> "Guard":
        """The guard before the first step."""
        scales = train.compute_dtype == "float16" and train.skip_non_finite
        none = jnp.int32(0)
        return cls(none, none, none, jnp.float32(_FIRST_SCALE) if scales else None)

    def after(
        self, finite: jax.Array, limit: int, has_targets: jax.Array | bool = True
    ) -> tuple["Guard", jax.Array]:
        """The guard after a step, and whether the run stops (a bool array).

        Once the run has stopped, the guard no longer changes.

        Args:
          finite: whether the step's loss and gradient norm are finite.
          limit: the number of consecutive non-finite steps that may be skipped.
          has_targets: whether the step has any target.
        """
        stopped, updates = self.in_row > limit, finite & has_targets
        in_row = jnp.where(finite, jnp.where(has_targets, 0, self.in_row), self.in_row + 1)
        stops = stopped | (in_row > limit)
        held = jnp.where(finite, self.finite_steps + updates, 0)
        scale = self.loss_scale
        if scale is not None:
            scale = jnp.where(finite, scale * jnp.where(held == _PERIOD, 2, 1), scale / 2)
        new = Guard(in_row, self.skipped + (~updates & ~stops), held % _PERIOD, scale)
        return jax.tree.map(lambda new, old: jnp.where(stopped, old, new), new, self), stops

    def saved(self) -> dict[str, float]:
        """The numbers that a checkpoint keeps, by name."""
        numbers = {"skipped": int(self.skipped), "finite_steps": int(self.finite_steps)}
        if self.loss_scale is not None:
            numbers["loss_scale"] = float(self.loss_scale)
        return numbers

    def restored(self, saved: Mapping[str, float]) -> "Guard":
        """This fresh guard with the numbers that `saved` returned; absent ones stay."""
        scale = self.loss_scale
        return self._replace(
            skipped=jnp.int32(saved.get("skipped", 0)),
            finite_steps=jnp.int32(saved.get("finite_steps", 0)),
            loss_scale=None if scale is None else jnp.float32(saved.get("loss_scale", scale)),
        )
