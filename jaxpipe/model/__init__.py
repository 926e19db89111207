"""Model families and their configurations. Importing this package does not import jax."""

from jaxpipe.model.families import FAMILIES, PRESETS
from jaxpipe.model.family import ModelConfig, ModelFamily

__all__ = ["FAMILIES", "PRESETS", "ModelConfig", "ModelFamily"]
