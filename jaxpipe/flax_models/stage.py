"""A stage as a Flax module."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx


class Stage(nnx.Module):
    """The layers of one stage, with the embedding or the head where the stage has them.

    Parameters are named by the layer's index in the whole model, so that their names do not depend
    on the number of stages: `layers/11/...` is the same layer under every split. A stage of all
    layers is the whole model.

    Attributes:
      embed: the embedding of the first stage; None elsewhere.
      layers: the layers by index in the model, as a string.
      head: what follows the last layer; None elsewhere.

    >>> rngs = nnx.Rngs(0)
    >>> stage = Stage({2: nnx.Linear(4, 4, rngs=rngs), 3: nnx.Linear(4, 4, rngs=rngs)})
    >>> list(stage.layers), stage(jax.numpy.ones((1, 4))).shape
    (['2', '3'], (1, 4))
    """

    def __init__(
        self,
        layers: Mapping[int, nnx.Module],
        embed: nnx.Module | None = None,
        head: nnx.Module | None = None,
    ):
        self.embed = nnx.data(embed)
        self.layers = nnx.Dict({str(index): layer for index, layer in sorted(layers.items())})
        self.head = nnx.data(head)

    def __call__(self, x: Any) -> Any:
        """Apply the stage to tokens where it has the embedding, else to the last stage's output."""
        if self.embed is not None:
            x = self.embed(x)
        for index in sorted(self.layers, key=int):
            x = self.layers[index](x)
        return x if self.head is None else self.head(x)


class PipelineStage(NamedTuple):
    """A stage, and the shapes and dtypes of its input and output for one microbatch."""

    module: Stage
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct


def build_pipeline_stage(module: Stage, x: Any) -> PipelineStage:
    """Return a stage with the shapes at its boundaries; nothing is computed.

    Args:
      module: the stage.
      x: one microbatch of its input, an array or `jax.ShapeDtypeStruct`: the embedding's inputs
        in the first stage, the previous stage's output elsewhere.

    >>> stage = Stage({0: nnx.Linear(4, 4, rngs=nnx.Rngs(0))})
    >>> build_pipeline_stage(stage, jax.ShapeDtypeStruct((2, 4), "float32")).y.shape
    (2, 4)
    """
    y = nnx.eval_shape(lambda module, x: module(x), module, x)
    return PipelineStage(module, *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, y)))
