"""The state of a run."""

from typing import Any, NamedTuple

import jax

from jaxpipe.training.step_guard import StepGuard

Tree = Any


class State(NamedTuple):
    """Stage-stacked parameters and moments, and the number of steps so far (int32).

    `variables` is the model's state that is no parameter; None: it has none. `guard` counts
    non-finite steps and holds the loss scale.
    """

    params: Tree
    optimizer: Tree
    step: jax.Array
    variables: Tree
    guard: StepGuard

    def parts(self) -> dict[str, Tree]:
        """The entries that a checkpoint stores as arrays, by name; inverse: `Trainer.state_of`."""
        parts = self._asdict()
        del parts["guard"]
        return {name: part for name, part in parts.items() if part is not None}
