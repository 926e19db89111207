"""Pipelined training as one SPMD program: any schedule is a table that one scan reads."""

from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.executor import Pipeline, loss_and_gradients
from jaxpipe.pipeline.reference import losses_and_gradients_ref
from jaxpipe.pipeline.split import POLICIES, LayerSplit, split_layer
from jaxpipe.pipeline.stage import StageFunctions

__all__ = [
    "POLICIES",
    "Execution",
    "LayerSplit",
    "Pipeline",
    "StageFunctions",
    "loss_and_gradients",
    "losses_and_gradients_ref",
    "split_layer",
]
