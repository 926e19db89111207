"""What a model is to the rest of the core: layers, embedding, head, parameters. Imports no jax."""

from jaxpipe.core.contract.layer import (
    Aux,
    Context,
    LayerKind,
    LayerOutput,
    Tree,
)
from jaxpipe.core.contract.model import StageFunctions

__all__ = [
    "Aux",
    "Context",
    "LayerKind",
    "LayerOutput",
    "StageFunctions",
    "Tree",
]  # fmt: skip
