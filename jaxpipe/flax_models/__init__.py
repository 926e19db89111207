"""Flax modules, yours or a whole model's layers, as the stages of a pipeline."""

from jaxpipe.flax_models.pipeline import FlaxPipeline, build_pipeline_schedule, from_flax
from jaxpipe.flax_models.stage import PipelineStage, Stage, build_pipeline_stage

__all__ = [
    "FlaxPipeline",
    "PipelineStage",
    "Stage",
    "build_pipeline_schedule",
    "build_pipeline_stage",
    "from_flax",
]
