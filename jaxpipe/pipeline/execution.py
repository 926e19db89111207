"""The ways of running a schedule."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxpipe.pipeline.messages import MessagePrinter
from jaxpipe.pipeline.split import POLICIES, Policy
from jaxpipe.schedule import Lockstep


@dataclass(frozen=True)
class Execution:
    """How a schedule is run; only the dtypes change what is computed.

    `lockstep` says how the schedule is laid out in ticks; its `vocab_parallel` is for functions
    whose collectives span pp too. `remat` names a policy of `jaxpipe.pipeline.split.POLICIES`, or
    is one of `jax.checkpoint_policies`, such as `save_only_these_names(...)`: it says what F may
    store for B and W.

    Parameters are cast to `compute_dtype` once a step (None: kept); gradients are accumulated in
    the parameters' own dtype. In float16, without a loss scale, they are divided by the number of
    the loss's terms only at the end: a term's share of the mean would be lost below its least
    number.

    `zero_stage` says what the replicas along dp hold parts of (Rajbhandari et al. 2020): 1 all that
    outlives a step, 2 the gradients too, which are then scattered as they are summed; 3 the
    parameters also within a step if `reshard_after_forward`, where every action gathers a layer
    anew and scatters its gradient. Otherwise parameters are gathered once a step. Gradients go over
    the replicas in `grad_reduce_dtype` (None: as they are accumulated).

    What the first `offload_layers` layers of every stage leave for B and W waits in the memory of
    the device's host (Wan et al. 2025, arXiv 2503.01328). It is copied while other layers compute.

    With `overlap_sums` the last tick that has a gradient stands behind the scan: there the sums
    over replicas of a layer's gradient run while the layers before it compute (`ticks.py`).

    `poison_bubbles` fills idle messages and free slots with NaN, to show that no result
    depends on them. A `printer` prints messages between ranks.

    >>> how = Execution(Lockstep(in_flight=7), remat="selective", compute_dtype=jnp.bfloat16)
    >>> how.zero_stage, how.divides_at_end
    (0, False)
    """

    lockstep: Lockstep = field(default_factory=Lockstep)
    remat: str | Policy = "none"
    compute_dtype: Any = None
    zero_stage: int = 0
    reshard_after_forward: bool = False
    grad_reduce_dtype: Any = None
    offload_layers: int = 0
    overlap_sums: bool = False
    poison_bubbles: bool = False
    printer: MessagePrinter | None = None

    @property
    def policy(self) -> Policy:
        """Which values F may store."""
        return POLICIES[self.remat] if isinstance(self.remat, str) else self.remat

    @property
    def divides_at_end(self) -> bool:
        """Whether gradients are those of the summed loss until the step's end."""
        return self.compute_dtype == jnp.float16
