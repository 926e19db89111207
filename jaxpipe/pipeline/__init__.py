"""Pipelined training as one SPMD program: any schedule is a table that one scan reads."""

from jaxpipe.contract import Context, LayerKind, LayerOutput, Side, StageFunctions
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
    "Context",
    "Execution",
    "LayerKind",
    "LayerOutput",
    "LayerSplit",
    "Pipeline",
    "Side",
    "StageFunctions",
    "StepOutput",
    "loss_and_gradients",
    "losses_and_gradients_ref",
    "split_layer",
    "step_ref",
    "total_count",
]
