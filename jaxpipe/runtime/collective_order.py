"""Compiled programs that XLA for CPUs cannot load again, and so must not be stored.

Devices have to begin their collectives in one order. XLA for CPUs runs instructions of a device at
the same time where no data orders them. A resource that all collectives share lets one begin only
after those before it, or the loop or branch that has them (why that is enough:
`jax_internals.give_collectives_channels`). In a program that is loaded from the compile cache, each
branch and loop body has a resource of its own: a collective in a branch and one beside the branch
may then begin in any order, and devices wait for each other for ever (seen with jaxlib 0.12.0.1).
On GPUs the order is that of a stream.
"""

from functools import cache
from typing import Any

from jaxpipe.jax_internals import store_programs_if
from jaxpipe.runtime.hlo import Instruction, parse_computations

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_NESTING = ("call", "conditional", "while")


@cache  # once in a process
def store_ordered_programs() -> None:
    """Let jax's compile cache store only programs whose collectives are ordered by data."""
    store_programs_if(is_ordered)


def is_ordered(executable: Any) -> bool:
    """Return whether `collectives_are_ordered` in an executable, which has `hlo_modules()`."""
    return all(collectives_are_ordered(module.to_string()) for module in executable.hlo_modules())


def collectives_are_ordered(text: str) -> bool:
    """Return whether data order every collective in a branch or loop with those outside it.

    Args:
      text: a scheduled HLO module.
    """
    computations = parse_computations(text)

    @cache
    def communicates(name: str) -> bool:
        return any(one.opcode.startswith(_COLLECTIVES) or nests(one) for one in computations[name])

    def nests(one: Instruction) -> bool:
        called = [name for name in one.names if name in computations]
        return one.opcode in _NESTING and any(map(communicates, called))

    for instructions in computations.values():
        before: dict[str, set[str]] = {}  # what an instruction waits for
        collectives: list[tuple[str, bool]] = []  # each with whether it is nested
        for one in instructions:
            operands = set(one.names) & before.keys()
            before[one.name] = operands.union(*(before[name] for name in operands))
            nested = nests(one)
            if nested or one.opcode.startswith(_COLLECTIVES):
                if any(
                    (nested or other_nested) and other not in before[one.name]
                    for other, other_nested in collectives
                ):
                    return False
                collectives.append((one.name, nested))
    return True
