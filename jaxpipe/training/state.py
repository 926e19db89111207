"""The state of a run."""

from typing import Any, NamedTuple, Self

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
        """The entries that a checkpoint stores as arrays, by name."""
        parts = self._asdict()
        del parts["guard"]
        return {name: part for name, part in parts.items() if part is not None}

    @classmethod
    def of_parts(
        cls, parts: dict[str, Tree], guard: StepGuard, variables: Tree, shardings: "State"
    ) -> Self:
        """The state of `parts`, on its devices and in its kinds of memory.

        Args:
          parts: parameters where they belong, and what else a checkpoint stores.
          guard: of the state.
          variables: initial values, which stand for those that the checkpoint lacks.
          shardings: of the state.
        """
        stored = parts.get("variables")
        if isinstance(variables, dict):
            stored = jax.device_put(variables, shardings.variables) | (stored or {})
        moved = {
            "optimizer": jax.device_put(parts["optimizer"], shardings.optimizer),
            "guard": jax.device_put(guard, shardings.guard),
        }
        return cls(**parts | moved | {"variables": stored})
