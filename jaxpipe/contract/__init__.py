"""What a model is to the rest: its layers, its ends and its parameters. Nothing here needs jax."""

from jaxpipe.contract.layer import Context, LayerKind, LayerOutput, Names, Rounds, Side, point
from jaxpipe.contract.stages import StageFunctions

__all__ = [
    "Context", "LayerKind", "LayerOutput", "Names", "Rounds", "Side", "StageFunctions", "point",
]  # fmt: skip
