"""F of a layer beside the gradient of another, in rounds (DualPipe).

A layer names points (`pairing_point`), and a hook says up to which point F and the gradient run in
each round. Both are traced and their equations are run round by round; a barrier makes the next
round of either wait for the last round of both. Equations stay the same, so numbers differ only by
how XLA rounds within fusions.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var

from jaxpipe.core.contract import Tree
from jaxpipe.core.contract.layer import POINT, Half, Pair
from jaxpipe.core.split.jaxpr import bind, read, reads, trace_flat

Names = tuple[str, ...]
Rounds = Iterable[tuple[str | None, str | None]]
_IN_FORWARD, _IN_GRADIENT = POINT + "F: ", POINT + "a gradient: "  # prefixes of the points' names


def pairing_point(x: jax.Array, name: str) -> jax.Array:
    """Return x and mark a point where F, or the gradient at x, may pause.

    A gradient reaches the points of its layer from the last to the first.
    """

    @jax.custom_vjp
    def named(x: jax.Array) -> jax.Array:
        return checkpoint_name(x, _IN_FORWARD + name)

    named.defvjp(
        lambda x: (named(x), None), lambda _, dy: (checkpoint_name(dy, _IN_GRADIENT + name),)
    )
    return named(x)


def in_rounds(hook: Callable[[Names, Names], Rounds]) -> Pair:
    """Return a `LayerKind.pair` that runs F and a gradient in the rounds of a hook.

    Args:
      hook: `(forward, gradient) -> rounds`. The arguments are the names of the points that each
        reaches, in order. A round is one name or None for each: both run up to these points without
        waiting for each other, and the next round waits for both. What is left after the last round
        runs without order between the two. The hook sees no values, so it can change none, and is
        not called where either has no point.
    """
    return partial(run_in_rounds, hook=hook)


def run_in_rounds(
    forward: Half, gradient: Half, hook: Callable[[Names, Names], Rounds]
) -> list[Tree]:
    """Run F of a layer and the gradient of another in the rounds of a hook; return both outputs.

    Each is given as a function and its x or dy. Equations that depend on neither, such as those on
    residuals alone, wait for nothing. The hook is not called where F or the gradient has no named
    point, as in a layer slot that is empty on some rank. Raises `ValueError` where the hook names a
    point that has been passed or does not exist.
    """
    halves = _Half(*forward, _IN_FORWARD), _Half(*gradient, _IN_GRADIENT)
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
                f"the hook of pairs stops at the point {name!r}, which is not ahead: left are "
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
