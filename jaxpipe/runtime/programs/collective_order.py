"""Compiled programs that XLA for CPUs can load again, and that may therefore be stored.

XLA for CPUs runs instructions of a device at the same time where no data orders them. A resource
that all collectives share lets one begin only after those before it, or the loop or branch that has
them. In a program that is loaded, each branch and loop body has a resource of its own, so that a
device may wait in a collective of a branch and in one beside the branch at once.

Devices of one process may begin such collectives in different orders, because each has a channel of
its own (`jax_internals.give_collectives_channels`). But a collective may occupy a thread while it
waits, and if all threads waited, those that they wait for would never begin: a program is stored
only if there are threads for all, and loaded only where there are as many. Between processes, gloo
knows collectives by their order alone. On GPUs the order is that of a stream.
"""

import os
from functools import cache
from typing import Any

import jax

from jaxpipe.core.jax_internals import store_programs_if
from jaxpipe.runtime.programs.hlo import Instruction, parse_computations

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
def store_loadable_programs() -> None:
    """Let jax's compile cache store only programs that can be loaded again."""
    store_programs_if(lambda executable: not why_not_loadable(executable), str(thread_count()))


def thread_count() -> int:
    """The number of threads of XLA for CPUs, which reads NPROC when it starts."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


def why_not_loadable(executable: Any) -> str:
    """The reason why a program for CPUs could wait for ever if it were loaded; "" if it cannot.

    Args:
      executable: has `hlo_modules()` and `local_devices()`.
    """
    waiting = max(most_at_once(module.to_string()) for module in executable.hlo_modules())
    if jax.process_count() > 1:
        return "data do not order its collectives" if waiting > 1 else ""
    needed, threads = waiting * len(executable.local_devices()), thread_count()
    if needed <= threads:
        return ""
    return f"{needed} threads could wait in its collectives, but XLA has {threads}: set NPROC"


def most_at_once(text: str) -> int:
    """An upper bound of the collectives in which one device can be at the same time.

    Args:
      text: a scheduled HLO module.
    """
    computations = parse_computations(text)

    def collectives(one: Instruction) -> int:
        if one.opcode.startswith(_COLLECTIVES):
            return 1
        called = (name for name in one.names if name in computations)
        return max(map(most, called), default=0) if one.opcode in _NESTING else 0

    @cache
    def most(computation: str) -> int:
        before: dict[str, set[str]] = {}  # what an instruction waits for
        counts: dict[str, int] = {}
        nested = set()
        for one in computations[computation]:
            operands = set(one.names) & before.keys()
            before[one.name] = operands.union(*(before[name] for name in operands))
            if count := collectives(one):
                counts[one.name] = count
                if one.opcode in _NESTING:
                    nested.add(one.name)

        def beside(name: str) -> int:
            """The most while `name` runs: those directly in a computation share a resource."""
            free = {o for o in counts if name not in before[o] and o not in before[name]}
            return bool(free - nested) + sum(counts[other] for other in free & nested)

        return max(map(beside, counts), default=0)

    return max(map(most, computations), default=0)
