"""Costs in closed form, from sizes alone: FLOPs, bytes and bubbles. Nothing here needs jax."""

from jaxpipe.analysis.bubbles import BUBBLES, OpTimes, bubble, held_activations
from jaxpipe.analysis.decoder import (
    LayerBytes,
    embedding_parameters,
    head_flops,
    head_parameters,
    hidden_bytes,
    layer_bytes,
    layer_flops,
    layer_parameters,
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
    "embedding_parameters",
    "head_flops",
    "head_parameters",
    "held_activations",
    "hidden_bytes",
    "layer_bytes",
    "layer_flops",
    "layer_parameters",
    "peak_held",
    "vanilla_bytes",
    "vanilla_flops",
]
