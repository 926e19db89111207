"""Costs in closed form, from sizes alone: FLOPs, bytes and bubbles. Nothing here needs jax."""

from jaxpipe.analysis.bubbles import BUBBLES, OpTimes, bubble, held_activations
from jaxpipe.analysis.decoder import (
    LayerBytes,
    end_leaves,
    flops_per_token,
    head_flops,
    hidden_bytes,
    layer_bytes,
    layer_flops,
    layer_leaves,
    state_bytes,
)
from jaxpipe.analysis.flops import OpFlops
from jaxpipe.analysis.peaks import PEAKS, peak_held
from jaxpipe.analysis.vanilla import ActivationBytes, VanillaSizes, vanilla_bytes, vanilla_flops

__all__ = [
    "BUBBLES",
    "PEAKS",
    "ActivationBytes",
    "LayerBytes",
    "OpFlops",
    "OpTimes",
    "VanillaSizes",
    "bubble",
    "end_leaves",
    "flops_per_token",
    "head_flops",
    "held_activations",
    "hidden_bytes",
    "layer_bytes",
    "layer_flops",
    "layer_leaves",
    "peak_held",
    "state_bytes",
    "vanilla_bytes",
    "vanilla_flops",
]
