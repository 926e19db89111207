"""What stays constant during a step: tables, options, batch, and how losses become means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxpipe.core.contract import Tree
from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.schedule import TableRow, Tables


class Mean(NamedTuple):
    """How a sum of losses becomes a mean over the whole batch.

    Attributes:
      share: one over the number of terms; 0 where there are none.
      seed: cotangent of the sum.
    """

    share: jax.Array
    seed: jax.Array

    def recorded(self, losses: jax.Array, loss: jax.Array, m: jax.Array) -> jax.Array:
        """Return losses `[M, ...]` with microbatch m's share of the mean added."""
        return losses.at[m].add((loss * self.share).astype(losses.dtype))


@dataclass(frozen=True)
class StepData:
    """What stays constant during a step, on one device.

    Attributes:
      tables: the lowered schedule.
      execution: execution options.
      embed_head: parameters of embedding and head, gathered for compute.
      embed_head_of_layers: the same as layers read them; None: no layer does.
      batch: arrays `[M, B, ...]`.
      variables: the model's variables.
      head: the mean of the head's losses over the terms of the batch.
      aux: how auxiliary losses become means, by layer kind and name.
      counts: number of terms of the head's losses per microbatch, over all replicas, `[M]`.
      unscale: factor of the gradient sums at the end of the step; None: 1.
    """

    tables: Tables
    execution: Execution
    embed_head: Tree
    embed_head_of_layers: Tree
    batch: Tree
    variables: Tree
    head: Mean
    aux: Mapping[str, Mapping[str, Mean]]
    counts: jax.Array
    unscale: jax.Array | None

    @property
    def poison(self) -> bool:
        """Whether idle messages and free slots are filled with NaN."""
        return self.execution.poison_bubbles

    def rows(self, m: jax.Array) -> Tree:
        """Return the rows of microbatch m."""
        return buffers.read(self.batch, m)

    def choose(
        self,
        flag: Callable[[TableRow], Any],
        row: TableRow,
        yes: Callable[[], Tree],
        no: Callable[[], Tree],
    ) -> Tree:
        """Return `yes()` where the flag of the row is set, else `no()`.

        Where no row of the tables sets the flag, only `no` is compiled: XLA allocates memory even
        for a branch that is never taken.
        """
        if not np.any(flag(self.tables.columns)):
            return no()
        return lax.cond(flag(row), yes, no)
