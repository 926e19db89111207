"""Several steps in one program (`train.fused_steps`), which overlap as far as a schedule allows."""

from jaxpipe.training.fused.steps import FusedSteps, programs, round_to_programs

__all__ = ["FusedSteps", "programs", "round_to_programs"]
