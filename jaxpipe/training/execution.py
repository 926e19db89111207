"""How a run executes its schedule, by its configuration and the kind of its devices."""

import jax.numpy as jnp

from jaxpipe.core.executor import Execution
from jaxpipe.core.executor.messages import MessagePrinter
from jaxpipe.planning import RunPlan


def execution_of(plan: RunPlan) -> Execution:
    """How the schedule of a plan is executed on the plan's devices."""
    parallel, train, debug = plan.config.parallel, plan.config.train, plan.config.debug
    printer = MessagePrinter(debug.ticks, debug.pp_ranks) if debug.print_messages else None
    on_cpu = plan.devices.on_cpu
    return Execution(
        lockstep=plan.lockstep,
        remat="full" if train.remat == "ahead" else train.remat,
        remat_layers=train.remat_layers,
        compute_dtype=jnp.dtype(train.compute_dtype),
        zero_stage=parallel.zero_stage,
        grad_reduce_dtype=None if parallel.grad_reduce_dtype == "float32" else jnp.bfloat16,
        reshard_after_forward=parallel.reshards,
        offload_layers=train.offload_layers,
        unroll_layers=plan.unroll_layers,
        layers_per_iteration=parallel.unroll_layers or 1,
        overlap_halves=plan.config.halves,
        poison_bubbles=debug.poison_messages,
        printer=printer,
        # Collectives on CPU block; with `reshards` gradients are reduce-scattered in every
        # tick; and a gradient outside a branch would copy all residuals that are on the host.
        overlap_sums=not (on_cpu or parallel.reshards or train.offload_layers or parallel.dp == 1),
    )
