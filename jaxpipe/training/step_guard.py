"""State of skipped steps: their counts, the window of spikes, and the loss scale of float16."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.config import TrainConfig
from jaxpipe.training.spikes import SpikeWindow

_FIRST_SCALE = 2.0**15
_PERIOD = 2000  # consecutive finite updates after which the loss scale doubles


class StepGuard(NamedTuple):
    """Decides whether a step is accepted, is skipped, or stops the run.

    A step is accepted if its loss and gradient norm are finite, it is no spike (`SpikeWindow`), and
    it has a target. Too many consecutive non-finite steps or spikes stop the run: no later step
    changes the state.

    Attributes:
      in_row: int32, non-finite steps since the newest accepted step; the run stops when it exceeds
        `train.skip_non_finite`.
      skipped: int32, steps without an update in the run so far.
      finite_steps: int32, consecutive finite updates since the loss scale last changed.
      loss_scale: float32, factor of the mean loss in the backward pass, if float16 is used and
        steps may be skipped; otherwise None. A non-finite step halves it, and 2000 consecutive
        finite updates double it (Micikevicius et al. 2018, "Mixed precision training", section
        3.2).
      spikes: the window of recent steps; the run stops when its `in_row` exceeds
        `train.spike_limit`. None: spikes are not skipped.
    """

    in_row: jax.Array
    skipped: jax.Array
    finite_steps: jax.Array
    loss_scale: jax.Array | None
    spikes: SpikeWindow | None = None

    @classmethod
    def fresh(cls, train: TrainConfig) -> "StepGuard":
        """The guard before the first step."""
        scales = train.compute_dtype == "float16" and train.skip_non_finite
        none = jnp.int32(0)
        scale = jnp.float32(_FIRST_SCALE) if scales else None
        return cls(none, none, none, scale, SpikeWindow.fresh(train))

    def stops(self, train: TrainConfig) -> jax.Array:
        """Whether the run stops, or has stopped (a bool array)."""
        stops = self.in_row > train.skip_non_finite
        return stops if self.spikes is None else stops | (self.spikes.in_row > train.spike_limit)

    def after(
        self, loss: jax.Array, norm: jax.Array, train: TrainConfig,
        has_targets: jax.Array | bool = True,
    ) -> tuple["StepGuard", jax.Array]:  # fmt: skip
        """The guard after a step, and whether the step makes an update (a bool array).

        Once the run has stopped, the guard no longer changes.

        Args:
          loss, norm: the step's loss and gradient norm, scalars.
          train: the limits on consecutive skipped steps, and what a spike is.
          has_targets: whether the step has any target.
        """
        stopped, finite = self.stops(train), jnp.isfinite(loss) & jnp.isfinite(norm)
        accepted, spikes = finite & has_targets, self.spikes
        if spikes is not None:
            spike = accepted & spikes.is_spike(loss, norm, train.spike_sigma)
            accepted &= ~spike
            spikes = spikes.after(loss, norm, spike, accepted)
        in_row = jnp.where(accepted, 0, self.in_row + ~finite)
        finite_steps = jnp.where(finite, self.finite_steps + accepted, 0)
        scale = self.loss_scale
        if scale is not None:
            scale = jnp.where(finite, scale * jnp.where(finite_steps == _PERIOD, 2, 1), scale / 2)
        new = StepGuard(in_row, self.skipped, finite_steps % _PERIOD, scale, spikes)
        new = new._replace(skipped=self.skipped + (~accepted & ~new.stops(train)))
        new = jax.tree.map(lambda new, old: jnp.where(stopped, old, new), new, self)
        return new, accepted & ~stopped

    def ready(self) -> "StepGuard":
        """This guard with no series of skipped steps, so that a run that stopped can go on."""
        spikes = self.spikes and self.spikes._replace(in_row=jnp.int32(0))
        return self._replace(in_row=jnp.int32(0), spikes=spikes)

    def metrics(self) -> dict[str, jax.Array]:
        """The counts that are logged, by name."""
        counts = {"skipped_steps": self.skipped, "not_finite_in_row": self.in_row}
        return counts if self.spikes is None else counts | {"spikes_in_row": self.spikes.in_row}

    def saved(self) -> dict[str, Any]:
        """The numbers that a checkpoint keeps, by name."""
        numbers: dict[str, Any] = {
            "in_row": int(self.in_row),
            "skipped": int(self.skipped),
            "finite_steps": int(self.finite_steps),
        }
        if self.loss_scale is not None:
            numbers["loss_scale"] = float(self.loss_scale)
        if self.spikes is not None:
            numbers["spikes"] = self.spikes.saved()
        return numbers

    def restored(self, saved: Mapping[str, Any]) -> "StepGuard":
        """This fresh guard with the numbers that `saved` returned; absent ones stay."""
        scale, spikes = self.loss_scale, self.spikes
        if spikes is not None and "spikes" in saved:
            spikes = spikes.restored(saved["spikes"])
        return self._replace(
            in_row=jnp.int32(saved.get("in_row", 0)),
            skipped=jnp.int32(saved.get("skipped", 0)),
            finite_steps=jnp.int32(saved.get("finite_steps", 0)),
            loss_scale=None if scale is None else jnp.float32(saved.get("loss_scale", scale)),
            spikes=spikes,
        )


def able_to_go_on(
    saved: Mapping[str, Any], train: TrainConfig, *, may_roll_back: bool, has_older: bool
) -> Mapping[str, Any]:
    """What `StepGuard.saved` returned, without a series of steps that would stop the resumed run.

    The run stopped at the next step, and from this checkpoint it would stop there again.

    Args:
      saved: the guard of a checkpoint.
      train: the limits on consecutive skipped steps.
      may_roll_back: whether `train.spike_rollbacks` allows another rollback.
      has_older: whether there is a checkpoint from before the series of spikes to go back to. If
        not, a new series begins, and the resumed run can go back to this checkpoint.
    """
    able = dict(saved)
    if able.get("in_row", 0) >= train.skip_non_finite:
        able["in_row"] = 0
    if spikes := able.get("spikes"):
        longest = train.spike_limit - 1
        if may_roll_back:
            longest = train.spike_limit if has_older else 0
        return able if spikes["in_row"] <= longest else without_spikes(able)
    return able


def without_spikes(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `StepGuard.saved` returned, perhaps with a window of spikes, and after none of them."""
    return {**saved, "spikes": {**saved["spikes"], "in_row": 0}} if "spikes" in saved else saved
