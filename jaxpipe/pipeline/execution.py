"""The ways of running a schedule."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpipe.pipeline.split import POLICIES, Policy


@dataclass(frozen=True)
class Execution:
    """How a schedule is run; none of it changes what is computed.

    `transfer_ticks` and `in_flight` are explained at `jaxpipe.schedule.cells.place`. `remat` names
    a policy of `jaxpipe.pipeline.split.POLICIES`, or is one of `jax.checkpoint_policies`, such as
    `save_only_these_names(...)`: it says what F may store for B and W. `defer_ends` lets the
    gradients of the head's and the embedding's matrices wait for W of their stages, for the memory
    of what they take: a whole gradient of the logits for each microbatch that waits.
    `vocab_parallel` has every rank hold and compute a part of the vocabulary at both ends, for
    functions whose collectives span pp too.

    Parameters are cast to `compute_dtype` once a step (None: kept); gradients are accumulated in
    the parameters' own dtype. In float16 they are divided by the number of the loss's terms only at
    the end: a term's share of the mean would be lost below its least number.

    `zero_stage` says what the replicas along dp hold parts of (Rajbhandari et al. 2020): 1 all that
    outlives a step, 2 the gradients too, which are then scattered as they are summed; 3 the
    parameters also within a step if `reshard_after_forward`, where every action gathers a layer
    anew and scatters its gradient. Otherwise parameters are gathered once a step.

    `pairs` puts the two halves of a cell, an F and a gradient of different chunks, into one branch,
    so that XLA may run collectives of one during the compute of the other; else they are two
    branches, and DualPipe compiles in two thirds of the time.

    `poison_bubbles` fills idle messages and free slots with NaN, to show that no result
    depends on them.
    """

    transfer_ticks: int = 1
    in_flight: int | None = None
    remat: str | Policy = "none"
    defer_ends: bool = False
    vocab_parallel: bool = False
    compute_dtype: Any = None
    zero_stage: int = 0
    reshard_after_forward: bool = False
    pairs: bool = True
    poison_bubbles: bool = False

    @property
    def policy(self) -> Policy:
        """Which values F may store."""
        return POLICIES[self.remat] if isinstance(self.remat, str) else self.remat

    @property
    def divides_at_end(self) -> bool:
        """Whether gradients are those of the summed loss until the step's end."""
        return self.compute_dtype == jnp.float16
