"""What a run is at a step, and a checkpoint holds."""

from typing import Any, NamedTuple

import jax

from jaxpipe.training.guard import Guard

Tree = Any


class State(NamedTuple):
    """Parameters and moments in stage form, and the number of steps made so far.

    `variables` are the model's state that is no parameter; None: it has none. `guard` knows of the
    steps that were not finite.
    """

    params: Tree
    optimizer: Tree
    step: jax.Array
    variables: Tree
    guard: Guard

    def parts(self) -> dict[str, Tree]:
        """What a checkpoint holds of it, by name; `Trainer.state_of` is the inverse."""
        parts = self._asdict()
        del parts["guard"]
        return {name: part for name, part in parts.items() if part is not None}
