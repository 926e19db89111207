"""What steps without an update leave to the next: their number, and the loss scale of float16."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.config import TrainConfig

_FIRST_SCALE = 2.0**15
_PERIOD = 2000  # finite steps in a row that double the loss scale


class Guard(NamedTuple):
    """Decides whether a step that is not finite is left out or stops the run.

    A step without any target has nothing to train on and is always left out.

    Attributes:
      in_row: int32, how many steps in a row were not finite, but for those without targets. A run
        stops at the first above `train.skip_non_finite`, and no step after it changes its state.
      skipped: int32, how many steps were left out in the whole run: those without an update.
      finite_steps: int32, how many in a row the loss scale has held for.
      loss_scale: float32, what backward multiplies the mean loss with, for float16 where steps may
        be left out: halved by a step that is not finite, doubled by 2000 in a row that are
        (Micikevicius et al. 2018, "Mixed precision training", section 3.2); else None.
    """

    in_row: jax.Array
    skipped: jax.Array
    finite_steps: jax.Array
    loss_scale: jax.Array | None

    @classmethod
    def fresh(cls, train: TrainConfig) -> "Guard":
        """Before the first step."""
        scales = train.compute_dtype == "float16" and train.skip_non_finite
        none = jnp.int32(0)
        return cls(none, none, none, jnp.float32(_FIRST_SCALE) if scales else None)

    def after(
        self, finite: jax.Array, limit: int, has_targets: jax.Array | bool = True
    ) -> tuple["Guard", jax.Array]:
        """After a step, where up to `limit` in a row may be left out; and whether the run stops.

        Once it has stopped nothing changes.
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
        """This one, which is fresh, with such numbers, as far as they were saved."""
        scale = self.loss_scale
        return self._replace(
            skipped=jnp.int32(saved.get("skipped", 0)),
            finite_steps=jnp.int32(saved.get("finite_steps", 0)),
            loss_scale=None if scale is None else jnp.float32(saved.get("loss_scale", scale)),
        )
