"""Finds programs of which XLA hides few collectives because memory ran short while it scheduled.

A scheduler that finds no order within the memory gives overlap up: collectives then start where
their results are needed, and the program may even take more memory.
"""

from typing import Any

import jax

from jaxpipe.config.units import readable_bytes
from jaxpipe.runtime.programs.hlo import Instruction, parse_computations

_FULL = 0.92  # of the memory: a program that takes less had room to be scheduled in
_FEW = 0.5  # of the collectives
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_COMPUTES = ("conditional", "custom-call", "while")  # a product of a library is a custom call


def why_exposed(compiled: jax.stages.Compiled, device: Any) -> str:
    """Return a warning if a program nearly fills a device's memory and hides few collectives.

    "" if it does not, or the memory that jax has of the device is not known.
    """
    usable = (device.memory_stats() or {}).get("bytes_limit")
    analysis = compiled.memory_analysis() if usable else None
    peak = analysis.peak_memory_in_bytes if analysis else 0
    if not usable or peak <= _FULL * usable:
        return ""
    hidden, count = count_hidden(compiled.as_text() or "")
    if hidden >= _FEW * count:
        return ""
    return (
        f"XLA ran out of memory while scheduling: the program takes {readable_bytes(peak)} of the "
        f"{readable_bytes(usable)} that jax allocates, and only {hidden} of its {count} "
        f"collectives are behind compute; lower train.microbatch_size or raise "
        f"train.remat_layers until it takes less than {_FULL:.0%}"
    )


def count_hidden(text: str) -> tuple[int, int]:
    """Return how many collectives of a scheduled module are behind compute, and how many it has.

    One is behind compute if a product, a branch or a loop starts before it ends. Permutes, which
    some schedules wait for, do not count.
    """
    hidden = count = 0
    computations = parse_computations(text)

    def is_collective(one: Instruction) -> bool:
        if one.opcode.startswith(_COLLECTIVES):
            return not one.opcode.endswith("-done")
        inside = (computations.get(name, ()) for name in one.names)
        starts = one.opcode in ("async-start", "fusion-start")
        return starts and any(is_collective(inner) for body in inside for inner in body)

    wrapped = {
        name
        for body in computations.values()
        for one in body
        if one.opcode in ("async-start", "fusion-start")
        for name in one.names
    }
    for name, body in computations.items():
        for at, start in enumerate(body):
            if name in wrapped or not is_collective(start):
                continue
            count += 1
            if not start.opcode.endswith("-start") or '"is_sync":true' in start.rest:
                continue
            for later in body[at + 1 :]:
                if start.name in later.operands:
                    break
                if later.opcode in _COMPUTES:
                    hidden += 1
                    break
    return hidden, count
