"""Models: families of decoders, and what their layers are built of. This much needs no jax."""

from jaxpipe.model.families import FAMILIES, PRESETS
from jaxpipe.model.family import Family, ModelConfig

__all__ = ["FAMILIES", "PRESETS", "Family", "ModelConfig"]
