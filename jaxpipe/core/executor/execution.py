"""Execution options: how a schedule is run."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxpipe.core.executor.messages import MessagePrinter
from jaxpipe.core.schedule import Lockstep
from jaxpipe.core.split.halves import Halves
from jaxpipe.core.split.split import POLICIES, Policy


@dataclass(frozen=True)
class Execution:
    """Options of a run of a schedule; only the dtypes change what is computed.

    Attributes:
      lockstep: how the schedule is laid out in ticks. Its `vocab_parallel` needs model functions
        whose collectives span pp.
      remat: name of a policy in `jaxpipe.core.split.POLICIES`, or one of `jax.checkpoint_policies`:
        which values F may store for B and W.
      remat_layers: number of layers at the start of every stage of which F stores x alone, whatever
        `remat` says (Korthikanti et al. 2022, section 5).
      compute_dtype: parameters are cast to it once per step (None: not cast). Gradients are
        accumulated in the dtype of the parameters. In float16, without a loss scale, they are
        divided by the number of loss terms only at the end of the step, since the share of one term
        would underflow.
      zero_stage: what is sharded over the dp replicas (Rajbhandari et al. 2020). 1: parameters and
        optimizer state between steps; 2: also gradients, by a reduce-scatter; 3: also parameters
        within a step, if `reshard_after_forward`.
      reshard_after_forward: every action gathers its layers and reduce-scatters their gradients.
        Otherwise parameters are gathered once per step.
      grad_reduce_dtype: dtype of gradient reductions over replicas; None: that of accumulation.
      offload_layers: number of layers at the start of every stage whose residuals are stored in
        host memory (Wan et al. 2025, arXiv 2503.01328); copies overlap with other layers' compute.
      unroll_layers: consecutive layers of one kind on a pipeline rank are one loop if there are
        more than this many (`StageLayout.unroll`); None: no loop. A loop is for neither
        `offload_layers`, whose copies overlap with the next layer, nor schedules that pair actions
        (DualPipe) layer by layer.
      layers_per_iteration: layers in one iteration of such a loop; more hide more collectives
        behind each other's compute, and take as much longer to compile.
      overlap_halves: layers run on two halves of a microbatch's rows, or of its sequences, which
        alternate: one computes while the other communicates (`core/split/phases.py`). Halves of
        sequences need a model for two sequence slices, and a schedule without slices. None: layers
        run on a microbatch at once.
      overlap_sums: run the last tick with a gradient after the scan, so that the all-reduce of a
        layer's gradient overlaps with the backward of the layers before it, and the first tick
        before the scan, so that the all-gather of a layer's parameters overlaps with F of the
        layers before it (`ticks.py`).
      poison_bubbles: fill idle messages and free slots with NaN, to show that no result depends on
        them.
      printer: prints messages between pipeline ranks.
      fingerprints: return a fingerprint of every device's gradient sums; not with `overlap_sums`
        and `reshard_after_forward`, which reduce sums before they are complete.

    >>> how = Execution(Lockstep(in_flight=7), remat="selective", compute_dtype=jnp.bfloat16)
    >>> how.zero_stage, how.divides_at_end
    (0, False)
    """

    lockstep: Lockstep = field(default_factory=Lockstep)
    remat: str | Policy = "none"
    remat_layers: int = 0
    compute_dtype: Any = None
    zero_stage: int = 0
    reshard_after_forward: bool = False
    grad_reduce_dtype: Any = None
    offload_layers: int = 0
    unroll_layers: int | None = None
    layers_per_iteration: int = 1
    overlap_halves: Halves | None = None
    overlap_sums: bool = False
    poison_bubbles: bool = False
    printer: MessagePrinter | None = None
    fingerprints: bool = False

    @property
    def policy(self) -> Policy:
        """The rematerialisation policy: which values F may store."""
        return POLICIES[self.remat] if isinstance(self.remat, str) else self.remat

    @property
    def divides_at_end(self) -> bool:
        """Whether gradients are of the summed loss and are divided at the end of the step."""
        return self.compute_dtype == jnp.float16
