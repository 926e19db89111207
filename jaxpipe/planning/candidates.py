"""Which schedules a configuration could have: every builder that its sizes allow."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxpipe.config import Config
from jaxpipe.planning.chosen import SEARCHED, V_SHAPED, layers_of, lockstep_of
from jaxpipe.planning.hardware import OpSeconds
from jaxpipe.schedule import Lockstep, Schedule, ScheduleError, build

_SEARCH = 100_000  # steps simulated by each search: less than a second


@dataclass(frozen=True)
class Candidate:
    """A schedule for a configuration, with the layers of every stage, and how GPUs would run it."""

    label: str
    schedule: Schedule
    layers: tuple[int, ...]
    lockstep: Lockstep


def candidates(config: Config, seconds: OpSeconds) -> tuple[list[Candidate], dict[str, str]]:
    """The schedules that fit the sizes, and why each of the others does not."""
    found: list[Candidate] = []
    refused: dict[str, str] = {}
    for label, name, options in _variants(config):
        try:
            found.append(_candidate(config, seconds, label, name, options))
        except ScheduleError as error:
            refused[label] = str(error)
    return found, refused


def candidate(config: Config, seconds: OpSeconds, label: str) -> Candidate:
    """The candidate of that label; raises `ScheduleError` where the sizes do not allow it."""
    name, options = next((name, o) for known, name, o in _variants(config) if known == label)
    return _candidate(config, seconds, label, name, options)


def _candidate(
    config: Config, seconds: OpSeconds, label: str, name: str, options: dict[str, Any]
) -> Candidate:
    parallel = config.parallel
    in_flight = options.pop("in_flight", None)
    lockstep = replace(lockstep_of(config, on_cpu=False), in_flight=in_flight)
    stages = parallel.pp * options.get("virtual_stages", 2 if name in V_SHAPED else 1)
    if not isinstance(parallel.layer_split, str) and len(parallel.layer_split) != stages:
        parallel = msgspec.structs.replace(parallel, layer_split="even")
    layers = layers_of(msgspec.structs.replace(config, parallel=parallel), stages)
    if name in SEARCHED:
        costs = seconds.costs(layers, shared_by=parallel.ends_shared_by)
        options |= {"costs": costs, "effort": _SEARCH}
    schedule = build(
        name, pp=parallel.pp, microbatches=config.train.grad_accum_steps, slices=parallel.slices,
        **options,
    )  # fmt: skip
    return Candidate(label, schedule, layers, lockstep)


def _variants(config: Config) -> list[tuple[str, str, dict[str, Any]]]:
    """`(label, builder, options)`, options of the builder and `in_flight`."""
    pp, layers = config.parallel.pp, config.model.n_layers
    chunked = [v for v in (2, 3, 4) if layers >= pp * v]
    found: list[tuple[str, str, dict[str, Any]]] = [("gpipe", "gpipe", {}), ("1f1b", "1f1b", {})]
    packed = 2 * pp - 1 + config.parallel.vocab_parallel_pp  # as `place` explains
    for ahead in sorted({(3 * pp - 1) // 2, packed} - {pp - 1, pp}):
        ahead += config.parallel.slices - 1
        found.append((f"1f1b in_flight={ahead}", "1f1b", {"in_flight": ahead}))
    for name in ("interleaved_1f1b", "bfs", "interleaved_zb"):
        found += [(f"{name} v={v}", name, {"virtual_stages": v}) for v in chunked]
    found += [(name, name, {}) for name in ("zb_h1", "zb_h2")]
    found += [(f"zb_auto {p}", "zb_auto", {"memory_limit": p}) for p in ("1p", "2p")]
    return found + [(name, name, {}) for name in (*V_SHAPED, "dualpipe")]
