"""The training step as one SPMD program: one scan runs the tables of any schedule."""

from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.executor import Pipeline, loss_and_gradients
from jaxpipe.core.executor.reference import (
    StepOutput,
    divisor,
    losses_and_gradients_ref,
    step_ref,
    total_count,
)

__all__ = [
    "Execution",
    "Pipeline",
    "StepOutput",
    "divisor",
    "loss_and_gradients",
    "losses_and_gradients_ref",
    "step_ref",
    "total_count",
]
