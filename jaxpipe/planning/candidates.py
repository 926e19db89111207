"""Which schedules a configuration could have: every family that its sizes allow."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxpipe.config import Config
from jaxpipe.planning.chosen import layers_of, lockstep_of, schedule_of
from jaxpipe.planning.hardware import OpSeconds
from jaxpipe.schedule import (
    FAMILIES,
    Lockstep,
    Schedule,
    ScheduleError,
    Sizes,
    Variant,
    build,
    family_of,
)

_SEARCH = 100_000  # steps simulated by each search: less than a second


@dataclass(frozen=True)
class Candidate:
    """A schedule for a configuration, with the layers of every stage, and how it would run.

    `configured`: it is the one that the configuration names, as a run would have it.
    """

    variant: Variant
    schedule: Schedule
    layers: tuple[int, ...]
    lockstep: Lockstep
    configured: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.variant.label


def candidates(config: Config, seconds: OpSeconds) -> tuple[list[Candidate], dict[str, str]]:
    """The schedules that fit the sizes, and by label why each of the others does not.

    The configuration's own comes first, and stands for the variant of its label.
    """
    own = variant_of(config)
    fitting: list[Candidate] = []
    refused: dict[str, str] = {}
    for variant in (own, *(v for v in variants(config) if v != own)):
        try:
            made = configured(config) if variant == own else candidate(config, seconds, variant)
        except ScheduleError as error:
            refused[variant.label] = str(error)
        else:
            fitting.append(made)
    return fitting, refused


def variants(config: Config) -> list[Variant]:
    """All that a plan of the configuration tries."""
    sizes = sizes_of(config)
    return [v for family in FAMILIES.values() for v in family.variants(family.name, sizes)]


def sizes_of(config: Config) -> Sizes:
    """What decides which variants are worth a try."""
    parallel = config.parallel
    return Sizes(parallel.pp, config.model.n_layers, parallel.slices, parallel.vocab_parallel_pp)


def variant_of(config: Config) -> Variant:
    """What the configuration names; raises `ScheduleError` for an unknown schedule."""
    parallel, family = config.parallel, family_of(config.parallel.schedule)
    return Variant(
        family.name,
        virtual_stages=parallel.virtual_stages or family.default("virtual_stages"),
        memory_limit=parallel.memory_limit or family.default("memory_limit"),
        in_flight=parallel.in_flight or None,
    )


def configured(config: Config, *, on_cpu: bool = False) -> Candidate:
    """The configuration's own schedule, exactly as a run has it; raises `ScheduleError` if none."""
    schedule = schedule_of(config)
    layers = layers_of(config, schedule.stages)
    lockstep = lockstep_of(config, on_cpu=on_cpu)
    return Candidate(variant_of(config), schedule, layers, lockstep, configured=True)


def again(config: Config, seconds: OpSeconds, made: Candidate) -> Candidate:
    """The same for another configuration; raises `ScheduleError` where there is none."""
    return configured(config) if made.configured else candidate(config, seconds, made.variant)


def candidate(config: Config, seconds: OpSeconds, variant: Variant) -> Candidate:
    """One of them; raises `ScheduleError` where the sizes do not allow it."""
    parallel, family = config.parallel, FAMILIES[variant.family]
    stages = parallel.pp * (variant.virtual_stages or family.stages)
    if not isinstance(parallel.layer_split, str) and len(parallel.layer_split) != stages:
        parallel = msgspec.structs.replace(parallel, layer_split="even")
    layers = layers_of(msgspec.structs.replace(config, parallel=parallel), stages)
    options: dict[str, Any] = {}
    if family.searched:
        costs = seconds.costs(layers, shared_by=parallel.ends_shared_by)
        options = {"costs": costs, "effort": _SEARCH}
    schedule = build(
        variant.family, pp=parallel.pp, microbatches=config.train.grad_accum_steps,
        virtual_stages=variant.virtual_stages, memory_limit=variant.memory_limit,
        slices=parallel.slices, **options,
    )  # fmt: skip
    lockstep = replace(lockstep_of(config, on_cpu=False), in_flight=variant.in_flight)
    return Candidate(variant, schedule, layers, lockstep)
