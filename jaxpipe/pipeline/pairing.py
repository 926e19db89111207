"""An F and a gradient in one cell, layer by layer: what runs together, and what waits.

The hook of a layer kind (`LayerKind.pair`) says up to which of their points the two run in a round.
Here both are traced, their equations are run in these parts, and behind a barrier the next part
waits for the last one of both. No equation is added, left out or changed, so numbers are the same
but for how XLA rounds in what it fuses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Var

from jaxpipe.contract.layer import IN_FORWARD, IN_GRADIENT, Names
from jaxpipe.pipeline.chunk import Gradients, Made, in_order
from jaxpipe.pipeline.jaxpr import bind, read, reads, trace_flat

Tree = Any
Work = tuple[Callable[[jax.Array], Tree], jax.Array]
Hook = Callable[[Names, Names], Any] | None


def paired(
    forward: Sequence[Callable[[Made], Made]], made: Made,
    gradient: Sequence[Callable[[Gradients], Gradients]], before: Gradients,
    hooks: Sequence[Hook],
) -> tuple[Made, Gradients]:  # fmt: skip
    """What a chunk's F and another's gradient leave, both given layer by layer.

    The first layer that F runs is paired with the first that the gradient runs, the last of its
    chunk, and so on as far as both have layers; `hooks` are those of F's layers. Behind one with a
    hook the next layers wait for both. The rest of the longer one follows alone.
    """
    together = min(len(forward), len(gradient)) if any(hooks) else 0
    for ahead, back, hook in zip(forward[:together], gradient[:together], hooks):
        if hook is None:
            made, before = ahead(made), back(before)
        else:
            run = lambda y, made=made, layer=ahead: layer(made._replace(y=y))  # noqa: E731
            undo = lambda dx, left=before, layer=back: layer(left._replace(dx=dx))  # noqa: E731
            made, before = in_rounds((run, made.y), (undo, before.dx), hook)
            y, dx = lax.optimization_barrier((made.y, before.dx))
            made, before = made._replace(y=y), before._replace(dx=dx)
    return in_order(forward[together:], made), in_order(gradient[together:], before)


def in_rounds(forward: Work, gradient: Work, hook: Callable[[Names, Names], Any]) -> list[Tree]:
    """What F of a layer and the gradient of another make, in the rounds of a hook.

    Each is given as a function and its x or dy. What does not follow from these two, as what the
    gradient makes of residuals alone, waits for nothing. The hook is not asked where one of them
    has no point to stop at, as in a slot that is empty on some rank. Raises `ValueError` where it
    names a point that is not ahead.
    """
    halves = _Half(*forward, IN_FORWARD), _Half(*gradient, IN_GRADIENT)
    points = [tuple(half.points) for half in halves]
    for stops in hook(*points) if all(points) else ():
        for half, stop in zip(halves, stops, strict=True):
            if stop is not None:
                half.run_to(stop)
        # What either runs from here on waits for all that both have run.
        tied = lax.optimization_barrier([half.waiting for half in halves])
        for half, values in zip(halves, tied):
            half.waiting = values
    return [half.rest() for half in halves]


class _Half:
    """F or a gradient of one layer, as equations of which the first have been run."""

    def __init__(self, run: Callable[[jax.Array], Tree], x: jax.Array, mark: str):
        def flat(x: jax.Array) -> list[Any]:
            leaves, self._form = jax.tree.flatten(run(x))
            return leaves

        closed = trace_flat(flat, x)
        self._jaxpr = closed.jaxpr
        self._given = dict(zip(closed.jaxpr.constvars, closed.consts))
        self._values: dict[Var, Any] = self._given | {closed.jaxpr.invars[0]: x}
        self._done = 0
        self.points: dict[str, int] = {}  # by name how many equations come before it, with its own
        for place, eqn in enumerate(closed.jaxpr.eqns):
            name = eqn.params["name"] if eqn.primitive.name == "name" else ""
            if name.startswith(mark):
                self.points.setdefault(name.removeprefix(mark), place + 1)

    def run_to(self, name: str) -> None:
        """Run the equations up to a point; raises `ValueError` where that is not ahead."""
        ahead = {point: place for point, place in self.points.items() if place > self._done}
        if name not in ahead:
            raise ValueError(
                f"LayerKind.pair stops at the point {name!r}, which is not ahead: left are "
                f"{', '.join(map(repr, ahead)) or 'none'}; name these in their order."
            )
        self._run(ahead[name])

    def rest(self) -> Tree:
        """Run what is left; what the whole half makes."""
        self._run(len(self._jaxpr.eqns))
        return jax.tree.unflatten(
            self._form, [read(self._values, var) for var in self._jaxpr.outvars]
        )

    @property
    def waiting(self) -> list[Any]:
        """What has been made, or is x or dy, and will be read."""
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
