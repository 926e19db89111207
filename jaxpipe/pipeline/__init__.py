"""Pipeline-parallel training as one SPMD program: one scan runs the tables of any schedule."""

from jaxpipe.contract import Aux, Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.pipeline.crossing import POLICIES
from jaxpipe.pipeline.execution import Execution
from jaxpipe.pipeline.executor import Pipeline, loss_and_gradients
from jaxpipe.pipeline.flax_pipeline import FlaxPipeline, build_pipeline_schedule, from_flax
from jaxpipe.pipeline.flax_stage import PipelineStage, Stage, build_pipeline_stage
from jaxpipe.pipeline.reference import (
    StepOutput,
    divisor,
    losses_and_gradients_ref,
    step_ref,
    total_count,
)
from jaxpipe.pipeline.split import LayerSplit, split_layer
from jaxpipe.schedule import compute_layer_assignment

__all__ = [
    "POLICIES",
    "Aux",
    "Context",
    "Execution",
    "FlaxPipeline",
    "LayerKind",
    "LayerOutput",
    "LayerSplit",
    "Pipeline",
    "PipelineStage",
    "Stage",
    "StageFunctions",
    "StepOutput",
    "build_pipeline_schedule",
    "build_pipeline_stage",
    "compute_layer_assignment",
    "divisor",
    "from_flax",
    "loss_and_gradients",
    "losses_and_gradients_ref",
    "split_layer",
    "step_ref",
    "total_count",
]
