"""The one way in which operations are timed: many in a compiled loop, which runs on its last state.

A loop is `(state, fixed) -> state`. Every iteration must depend on the one before it, or read
other slots of its ring buffers, so that XLA cannot hoist work out of the loop.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
Loop = Callable[[Tree, Tree], Tree]
SLOTS = 2


def iterations_of(platform: str) -> int:
    """The number of iterations to time on a platform: on CPU an operation takes long by itself."""
    return 2 if platform == "cpu" else 8


def repeated(run: Callable[[Tree, Tree, jax.Array], Tree], iterations: int) -> Loop:
    """The loop that calls `run(state, fixed, slot)`, with slots 0 and 1 in turn."""

    def loop(state: Tree, fixed: Tree) -> Tree:
        def iteration(state: Tree, slot: jax.Array) -> tuple[Tree, None]:
            return run(state, fixed, slot), None

        return lax.scan(iteration, state, jnp.arange(iterations) % SLOTS)[0]

    return loop


class TimedLoop:
    """A compiled loop, which donates its state, and has run once on a copy of `state`."""

    def __init__(self, loop: Loop, state: Tree, fixed: Tree, iterations: int):
        self._loop, self._fixed, self._iterations = loop, fixed, iterations
        self._state = _copied(state)
        self.seconds()

    def seconds(self) -> float:
        """Time of one iteration [s]."""
        begin = time.perf_counter()
        self._state = jax.block_until_ready(self._loop(self._state, self._fixed))
        return (time.perf_counter() - begin) / self._iterations


@jax.jit
def _copied(tree: Tree) -> Tree:
    """A copy that a loop may overwrite, because its state is donated."""
    return jax.tree.map(jnp.copy, tree)
