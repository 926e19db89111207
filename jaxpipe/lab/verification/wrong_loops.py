"""Loops over layers with a fault in each."""

from dataclasses import dataclass, fields
from typing import Any

from jaxpipe.core.executor.layer_run import LayerRun, OfLayer, Passed

Tree = Any


@dataclass(frozen=True)
class ForwardOrder(LayerRun):
    """A run whose gradients visit its first layer first, as F does."""

    def over_layers(
        self, layer: OfLayer, passed: Passed, gathered: Tree = None, after: LayerRun | None = None,
        *, backward: bool = False, **options: bool,
    ) -> tuple[Passed, Tree]:  # fmt: skip
        """As of `LayerRun`, but `backward` changes nothing."""
        if backward and self.layers > 1:
            gathered = None  # it is of the last layer
        return super().over_layers(layer, passed, gathered, after, **options)


def run_forward(run: LayerRun) -> LayerRun:
    """The run with its layers in the order of F."""
    return ForwardOrder(**{field.name: getattr(run, field.name) for field in fields(run)})


def has_loop(trainer: Any) -> bool:
    """Whether a pipeline rank runs a loop over layers."""
    return any(len(run) > 1 for run in trainer.layout.runs)
