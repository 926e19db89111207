"""What an action on a chunk's layers reads and returns, besides what ring buffers hold."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxpipe.core.contract import Aux, Context, Tree
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.ring_buffers import RingArrays
from jaxpipe.core.executor.step_data import Mean
from jaxpipe.core.executor.traced_kind import embed_head_of
from jaxpipe.core.schedule import TableRow


class ActionInputs(NamedTuple):
    """Inputs of an action that do not come from ring buffers.

    Attributes:
      row: the row of the tables.
      rows: the batch rows of the action's microbatch.
      variables: the model's variables.
      means: how auxiliary losses become means, by layer kind and name.
      embed_head: parameters of embedding and head as layers read them; None: no layer does.
    """

    row: TableRow
    rows: Tree
    variables: Tree
    means: Mapping[str, Mapping[str, Mean]]
    embed_head: Tree = None

    def context(self, layer: LayerRun, state: Tree) -> Context:
        """Return the context of one layer."""
        embed_head = embed_head_of(layer.kind.kind, self.embed_head)
        return Context(self.rows, layer.index, state, self.variables, embed_head)


class ForwardOutputs(NamedTuple):
    """Outputs of F.

    Attributes:
      y: output activation; between layers, and as the input of F, the current activation.
      rings: the ring buffers that F writes, by ring group.
      aux: sums, maxima and per-example values so far.
      loss: share of the auxiliary losses of the layers in their means; None: they have none.
      next_params: between runs, the parameters of the next layer if gathered ahead.
      params: of `Chunk.first_forward`, the gathered parameters of every run so far.
    """

    y: jax.Array
    rings: tuple[RingArrays, ...]
    aux: Aux
    loss: jax.Array | None
    next_params: Tree = None
    params: tuple[Tree, ...] = ()


class BackwardOutputs(NamedTuple):
    """Outputs of a gradient action.

    Attributes:
      dx: gradient at the input (W passes it through); as the input of B or BW, dy.
      rings: the ring buffers that the action writes, by ring group.
      grad_sums: gradient accumulators, by run.
      statistics: elementwise maxima, by name of the statistics variable.
      read_sums: gradient accumulators of embedding and head; None: no layer of the chunk reads
        them.
      next_params: as in `ForwardOutputs`.
      next_start: between runs, a zero without which the next run reads no residuals; None: it
        waits for nothing.
    """

    dx: jax.Array
    rings: tuple[RingArrays, ...]
    grad_sums: tuple[Tree, ...]
    statistics: Mapping[str, jax.Array] = {}
    read_sums: Tree = None
    next_params: Tree = None
    next_start: jax.Array | None = None
