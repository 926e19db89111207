"""Schedules by name: built, searched under costs and memory limits, balanced, timed and drawn."""

from jaxpipe.schedules.builders import build, check_memory
from jaxpipe.schedules.families import (
    BUILDERS,
    FAMILIES,
    NAMES,
    ScheduleFamily,
    ScheduleVariant,
    VariantSizes,
    find_family,
)
from jaxpipe.schedules.fused import fuse_steps, fusion_gain
from jaxpipe.schedules.search.balance import balance_layers, shorter_and_shorter
from jaxpipe.schedules.search.target import LIMITS
from jaxpipe.schedules.timing.draw import draw_timeline

__all__ = [
    "BUILDERS",
    "FAMILIES",
    "LIMITS",
    "NAMES",
    "ScheduleFamily",
    "ScheduleVariant",
    "VariantSizes",
    "balance_layers",
    "build",
    "check_memory",
    "draw_timeline",
    "find_family",
    "fuse_steps",
    "fusion_gain",
    "shorter_and_shorter",
]
