"""Pipeline-parallel training as one SPMD program: one scan runs the tables of any schedule."""

from jaxpipe.contract import Aux, Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.pipeline.cut import POLICIES
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.executor import Pipeline, loss_and_gradients
from jaxpipe.pipeline.reference import (
    StepOutput,
    losses_and_gradients_ref,
    step_ref,
    total_count,
)
from jaxpipe.pipeline.split import LayerSplit, split_layer

__all__ = [
    "POLICIES",
    "Aux",
    "Context",
    "Execution",
    "LayerKind",
    "LayerOutput",
    "LayerSplit",
    "Pipeline",
    "StageFunctions",
    "StepOutput",
    "loss_and_gradients",
    "losses_and_gradients_ref",
    "split_layer",
    "step_ref",
    "total_count",
]
