"""Going back to a checkpoint after too many loss spikes in a row, and on with later data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpipe.checkpoint import CheckpointStore
from jaxpipe.config import Config, ConfigError, TrainConfig
from jaxpipe.run.pending_steps import Dispatched
from jaxpipe.run.start import DataPosition, position_in
from jaxpipe.runtime import position
from jaxpipe.training.state import State
from jaxpipe.training.step_guard import without_spikes
from jaxpipe.training.trainer import Trainer


class Failure(NamedTuple):
    """A step after which the run must not continue, its metrics, and the state before it."""

    state: State
    dispatched: Dispatched
    values: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.dispatched.step

    @property
    def first_spike(self) -> int:
        """The first step of the series of spikes that this step ends; the next step if none."""
        return self.step - self.values.get("spikes_in_row", 0) + 1

    def is_of_spikes(self, train: TrainConfig) -> bool:
        """Whether there were too many spikes, rather than too many non-finite steps."""
        return self.values.get("spikes_in_row", 0) > train.spike_limit

    def reason(self, train: TrainConfig) -> str:
        """What stops the run, and at which step."""
        event = f"{describe_loss(self.values)} at step {self.step}"
        if not self.is_of_spikes(train):
            return event
        count = self.values["spikes_in_row"]
        return f"{event}, number {count} in a row of steps left out since a spike"


def describe_loss(values: dict[str, Any]) -> str:
    """The loss and the gradient norm of a step, for messages."""
    return f"loss {values['loss']}, gradient norm {values['grad_norm']}"


def can_roll_back(config: Config, checkpoints: CheckpointStore, failed: Failure) -> bool:
    """Whether the run may go back once more, and has a checkpoint from before the spikes."""
    train, so_far = config.train, failed.dispatched.before.rollbacks
    if not failed.is_of_spikes(train) or so_far >= train.spike_rollbacks:
        return False
    checkpoints.wait()
    return any(step < failed.first_spike for step in checkpoints.steps)


def roll_back(
    trainer: Trainer, checkpoints: CheckpointStore, failed: Failure, say: Callable[[str], None]
) -> tuple[State, DataPosition]:
    """The state of the newest checkpoint before the spikes, and the data position after them.

    Later checkpoints are removed, and the failed step's state is deleted. All processes call it.
    The data between the checkpoint and the last spike are passed over, as in Chowdhery et al. 2022,
    "PaLM", section 5.1. Raises `ConfigError` where every such checkpoint is damaged.
    """
    train, at = trainer.config.train, failed.dispatched.after
    position.enter("restore")
    jax.tree.map(lambda leaf: leaf.delete(), failed.state)  # otherwise devices hold two states
    last = failed.first_spike - 1
    restored = checkpoints.restore(trainer.state_shapes.parts(), say, last_step=last)
    if restored is None:
        raise ConfigError(
            f"{failed.reason(train)}: there is no undamaged checkpoint to go back to; start anew "
            f"in another run.dir, or go on from a later checkpoint with train.spike_rollbacks=0."
        )
    checkpoints.remove_after(last)
    parts, meta = restored
    before = position_in(meta, trainer.config)
    passed_over = at.position - before.samples + before.restarted_at
    seen = before._replace(passed_over=passed_over, rollbacks=at.rollbacks + 1)
    say(
        f"{failed.reason(train)}: rolled back to step {meta['step']}; samples {before.position}.."
        f"{at.position - 1} of the training order are passed over (rollback {seen.rollbacks} of at "
        f"most train.spike_rollbacks={train.spike_rollbacks})"
    )
    return trainer.state_of(parts, without_spikes(meta["guard"])), seen
