"""Model families and their configurations. Importing this package does not import jax."""

from jaxpipe.model.families import FAMILIES, PRESETS
from jaxpipe.model.family import Family, ModelConfig

__all__ = ["FAMILIES", "PRESETS", "Family", "ModelConfig"]
