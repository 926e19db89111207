"""Run an F and a gradient action of one cell together, layer by layer (DualPipe).

The hook of a layer kind (`LayerKind.pair`) returns rounds: up to which named point F and the
gradient action run in each. Both are traced and their equations are run round by round; a barrier
makes the next round of either wait for the last round of both. Equations stay the same, so numbers
differ only by how XLA rounds within fusions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Var

from jaxpipe.core.contract import Tree
from jaxpipe.core.contract.layer import IN_FORWARD, IN_GRADIENT, Names
from jaxpipe.core.executor.chunk import BackwardOutputs, ForwardOutputs, run_in_order
from jaxpipe.core.split.jaxpr import bind, read, reads, trace_flat

Work = tuple[Callable[[jax.Array], Tree], jax.Array]
Hook = Callable[[Names, Names], Any] | None


def run_paired(
    forward: Sequence[Callable[[ForwardOutputs], ForwardOutputs]], f_outputs: ForwardOutputs,
    gradient: Sequence[Callable[[BackwardOutputs], BackwardOutputs]], b_outputs: BackwardOutputs,
    hooks: Sequence[Hook],
) -> tuple[ForwardOutputs, BackwardOutputs]:  # fmt: skip
    """Run F of a chunk and a gradient action of another; return the outputs of both.

    The i-th layer that F runs is paired with the i-th layer that the gradient action runs (which
    starts at the last layer of its chunk); further layers of the longer chunk run alone at the end.
    After a pair whose F layer has a hook, the next layers of both wait for both.

    Args:
      forward: F of every layer, in order.
      f_outputs: outputs before F; their y is the input of F.
      gradient: the gradient action of every layer, in order.
      b_outputs: outputs before the gradient action; their dx is its dy.
      hooks: `LayerKind.pair` of F's layers; None: the two layers run without order between them.
    """
    together = min(len(forward), len(gradient)) if any(hooks) else 0
    for ahead, back, hook in zip(forward[:together], gradient[:together], hooks):
        if hook is None:
            f_outputs, b_outputs = ahead(f_outputs), back(b_outputs)
        else:
            run_f = partial(_run_on_y, ahead, f_outputs)
            run_b = partial(_run_on_dy, back, b_outputs)
            f_outputs, b_outputs = run_in_rounds((run_f, f_outputs.y), (run_b, b_outputs.dx), hook)
            y, dx = lax.optimization_barrier((f_outputs.y, b_outputs.dx))
            f_outputs, b_outputs = f_outputs._replace(y=y), b_outputs._replace(dx=dx)
    return run_in_order(forward[together:], f_outputs), run_in_order(gradient[together:], b_outputs)


def _run_on_y(
    layer: Callable[[ForwardOutputs], ForwardOutputs], before: ForwardOutputs, y: jax.Array
) -> ForwardOutputs:
    return layer(before._replace(y=y))


def _run_on_dy(
    layer: Callable[[BackwardOutputs], BackwardOutputs], before: BackwardOutputs, dy: jax.Array
) -> BackwardOutputs:
    return layer(before._replace(dx=dy))


def run_in_rounds(forward: Work, gradient: Work, hook: Callable[[Names, Names], Any]) -> list[Tree]:
    """Run F of a layer and the gradient of another in the rounds of a hook; return both outputs.

    Each is given as a function and its x or dy. Equations that depend on neither, such as those on
    residuals alone, wait for nothing. The hook is not called where F or the gradient has no named
    point, as in a layer slot that is empty on some rank. Raises `ValueError` where the hook names a
    point that has been passed or does not exist.
    """
    halves = _Half(*forward, IN_FORWARD), _Half(*gradient, IN_GRADIENT)
    points = [tuple(half.points) for half in halves]
    for stops in hook(*points) if all(points) else ():
        for half, stop in zip(halves, stops, strict=True):
            if stop is not None:
                half.run_to(stop)
        # The next round of either waits for everything that both have run.
        tied = lax.optimization_barrier([half.waiting for half in halves])
        for half, values in zip(halves, tied):
            half.waiting = values
    return [half.rest() for half in halves]


class _Half:
    """F or a gradient of one layer, as equations that are run up to a point."""

    def __init__(self, run: Callable[[jax.Array], Tree], x: jax.Array, mark: str):
        def flat(x: jax.Array) -> list[Any]:
            leaves, self._form = jax.tree.flatten(run(x))
            return leaves

        closed = trace_flat(flat, x)
        self._jaxpr = closed.jaxpr
        self._given = dict(zip(closed.jaxpr.constvars, closed.consts))
        self._values: dict[Var, Any] = self._given | {closed.jaxpr.invars[0]: x}
        self._done = 0
        self.points: dict[str, int] = {}  # by name, the number of equations to run
        for place, eqn in enumerate(closed.jaxpr.eqns):
            name = eqn.params["name"] if eqn.primitive.name == "name" else ""
            if name.startswith(mark):
                self.points.setdefault(name.removeprefix(mark), place + 1)

    def run_to(self, name: str) -> None:
        """Run the equations up to a point; raise `ValueError` unless it is still ahead."""
        ahead = {point: place for point, place in self.points.items() if place > self._done}
        if name not in ahead:
            raise ValueError(
                f"LayerKind.pair stops at the point {name!r}, which is not ahead: left are "
                f"{', '.join(map(repr, ahead)) or 'none'}; name these in their order."
            )
        self._run(ahead[name])

    def rest(self) -> Tree:
        """Run the remaining equations and return the outputs."""
        self._run(len(self._jaxpr.eqns))
        return jax.tree.unflatten(
            self._form, [read(self._values, var) for var in self._jaxpr.outvars]
        )

    @property
    def waiting(self) -> list[Any]:
        """The live values: computed so far (or x or dy) and read by a remaining equation."""
        return [self._values[var] for var in self._waiting()]

    @waiting.setter
    def waiting(self, values: list[Any]) -> None:
        self._values.update(zip(self._waiting(), values))

    def _waiting(self) -> list[Var]:
        left = reads(self._jaxpr.eqns[self._done :], self._jaxpr.outvars)
        return [var for var in left if var in self._values and var not in self._given]

    def _run(self, end: int) -> None:
        for eqn in self._jaxpr.eqns[self._done : end]:
            bind(eqn, self._values)
        self._done = end
