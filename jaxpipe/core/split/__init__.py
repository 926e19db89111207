"""A traced layer, cut into F, B and W."""

from jaxpipe.core.split.crossing import POLICIES
from jaxpipe.core.split.split import LayerSplit, split_layer

__all__ = ["POLICIES", "LayerSplit", "split_layer"]
