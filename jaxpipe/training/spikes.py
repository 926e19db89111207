"""Loss spikes: steps whose loss or gradient norm is far above that of recent steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import TrainConfig


class SpikeWindow(NamedTuple):
    """Losses and gradient norms of the newest accepted steps, and the current series of spikes.

    A step is a spike if its loss or its gradient norm is above the mean of the window by more than
    `train.spike_sigma` standard deviations. Nothing is a spike until half of the window is filled.
    Source: `SkipStepOptimizer` of OLMo-core, and `skip_step_on_spikes` of MaxText.

    Attributes:
      recent: float32 `[2, train.spike_window]`, losses and norms, oldest first; infinity:
        not filled, since NaN would differ from itself where jax compares the processes' values.
      in_row: int32, steps since the first spike after the newest accepted step, that one included.
        The series has steps of any kind without an update; 0: the newest step was accepted.
    """

    recent: jax.Array
    in_row: jax.Array

    @classmethod
    def fresh(cls, train: TrainConfig) -> "SpikeWindow | None":
        """The window before the first step; None if spikes are not skipped."""
        if not train.spike_sigma:
            return None
        return cls(jnp.full((2, train.spike_window), jnp.inf, jnp.float32), jnp.int32(0))

    def is_spike(self, loss: jax.Array, norm: jax.Array, sigma: float) -> jax.Array:
        """Whether a step with this finite loss and norm is a spike (a bool array)."""
        size = self.recent.shape[1]
        filled = jnp.isfinite(self.recent)
        count = filled.sum(axis=1)
        mean = jnp.where(filled, self.recent, 0).sum(axis=1) / jnp.maximum(count, 1)
        squares = jnp.where(filled, self.recent - mean[:, None], 0) ** 2
        std = jnp.sqrt(squares.sum(axis=1) / jnp.maximum(count, 1))
        above = _both(loss, norm) > mean + sigma * std
        return (above & (2 * count >= size)).any()

    def after(
        self, loss: jax.Array, norm: jax.Array, spike: jax.Array, accepted: jax.Array
    ) -> "SpikeWindow":
        """The window after a step, which enters it if it is accepted."""
        moved = jnp.concatenate([self.recent[:, 1:], _both(loss, norm)[:, None]], axis=1)
        in_row = jnp.where(spike | (self.in_row > 0), self.in_row + 1, 0)
        return SpikeWindow(jnp.where(accepted, moved, self.recent), jnp.where(accepted, 0, in_row))

    def saved(self) -> dict[str, Any]:
        """The numbers that a checkpoint keeps, without entries that are not filled."""
        losses, norms = np.asarray(self.recent)
        filled = np.isfinite(losses)
        return {
            "losses": losses[filled].tolist(),
            "norms": norms[filled].tolist(),
            "in_row": int(self.in_row),
        }

    def restored(self, saved: Mapping[str, Any]) -> "SpikeWindow":
        """This fresh window with the numbers that `saved` returned, perhaps of another size."""
        recent = np.array(self.recent)
        newest = np.array([saved["losses"], saved["norms"]], np.float32)[:, -recent.shape[1] :]
        recent[:, recent.shape[1] - newest.shape[1] :] = newest
        return SpikeWindow(jnp.asarray(recent), jnp.int32(saved["in_row"]))


def _both(loss: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.stack([loss, norm]).astype(jnp.float32)
