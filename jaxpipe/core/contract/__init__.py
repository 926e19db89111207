"""What a model is to the rest of the core: layers, embedding, head, parameters. Imports no jax."""

from jaxpipe.core.contract.layer import (
    Aux,
    Context,
    LayerKind,
    LayerOutput,
    Names,
    Rounds,
    Tree,
    pairing_point,
)
from jaxpipe.core.contract.model import StageFunctions

__all__ = [
    "Aux",
    "Context",
    "LayerKind",
    "LayerOutput",
    "Names",
    "Rounds",
    "StageFunctions",
    "Tree",
    "pairing_point",
]  # fmt: skip
