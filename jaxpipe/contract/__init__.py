"""What a model is to the other packages: layers, embedding, head, parameters. Imports no jax."""

from jaxpipe.contract.layer import (
    Aux,
    Context,
    LayerKind,
    LayerOutput,
    Names,
    Rounds,
    pairing_point,
)
from jaxpipe.contract.stages import StageFunctions

__all__ = [
    "Aux",
    "Context",
    "LayerKind",
    "LayerOutput",
    "Names",
    "Rounds",
    "StageFunctions",
    "pairing_point",
]  # fmt: skip
