"""The variables of a layer's traced forward and backward, by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var

from jaxpipe.core.contract import Context, LayerOutput, Tree
from jaxpipe.core.split.jaxpr import shape_of


class Cotangent(NamedTuple):
    """Gradients at the outputs of a layer, or at its inputs.

    Attributes:
      value: gradient at y or x.
      state: gradients at the inexact leaves of the state.
      losses: gradients at the sums of the auxiliary losses, by name.
      statistics: gradients at the statistics variables, by name.
    """

    value: Any
    state: tuple[Any, ...] = ()
    losses: Mapping[str, Any] = {}
    statistics: Mapping[str, Any] = {}


class Weights(NamedTuple):
    """The parameters that a layer reads, or a value for each of them.

    Attributes:
      params: its own.
      embed_head: those of embedding and head; None unless the layer reads them.
    """

    params: Tree
    embed_head: Tree = None


class Ports(NamedTuple):
    """The inputs and outputs of a layer's jaxpr: trees with a variable for every array.

    Attributes:
      params: the parameters.
      context: the context, without its state.
      x: the input activation.
      state: the state that earlier slices left.
      dy: gradients at the outputs.
      output: what the layer returns.
      dx: gradients at the inputs.
      gradients: gradients of parameters; None for frozen ones, and for those of embedding and head
        that the layer does not use.
      of_state: those whose last products read the state that the layer returns.
      recurrent: the state is recurrent (`LayerKind.recurrent`).
    """

    params: Tree
    context: Context
    x: Var
    state: Tree
    dy: Cotangent
    output: LayerOutput
    dx: Cotangent
    gradients: Weights
    of_state: frozenset[Var] = frozenset()
    recurrent: bool = False

    @property
    def left_state(self) -> list[Var]:
        """The state that the layer returns, if B is given what the last slice left of it."""
        return [] if self.recurrent else jax.tree.leaves(self.output.state)

    @property
    def stored_inputs(self) -> set[Var]:
        """The inputs that F may store under every policy."""
        return {self.x, *jax.tree.leaves(self.state)} if self.recurrent else {self.x}

    @property
    def gradients_of_b(self) -> Weights:
        """The gradients that B computes, of vectors and of products with the state; else None."""
        return self._gradients(of_b=True)

    @property
    def gradients_of_w(self) -> Weights:
        """The gradients that W computes, of other matrices; else None."""
        return self._gradients(of_b=False)

    def _gradients(self, *, of_b: bool) -> Weights:
        def is_wanted(var: Var) -> bool:
            return (shape_of(var).ndim < 2 or var in self.of_state) is of_b

        return jax.tree.map(lambda var: var if is_wanted(var) else None, self.gradients)

    @property
    def made_by_b(self) -> list[Any]:
        """The outputs of B, in order."""
        return jax.tree.leaves((self.dx, self.gradients_of_b))
