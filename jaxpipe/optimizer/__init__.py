"""Optimizers on stage-stacked parameters, learning rates, clipping by norm, and the update."""

from jaxpipe.optimizer.build import KINDS, averaged, build, has_average, kind_of
from jaxpipe.optimizer.custom import load_custom
from jaxpipe.optimizer.groups import groups
from jaxpipe.optimizer.layerwise import check_independent, layerwise
from jaxpipe.optimizer.rate import learning_rate
from jaxpipe.optimizer.update import apply, clip_by_global_norm, global_norm

__all__ = [
    "KINDS",
    "apply",
    "averaged",
    "build",
    "check_independent",
    "clip_by_global_norm",
    "global_norm",
    "groups",
    "has_average",
    "kind_of",
    "layerwise",
    "learning_rate",
    "load_custom",
]
