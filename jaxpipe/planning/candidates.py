"""The schedules that a configuration could run: every family that its sizes allow."""

from dataclasses import dataclass

import msgspec

from jaxpipe.config import Config
from jaxpipe.planning.chosen import QUICK, Choice, chosen
from jaxpipe.planning.hardware import OpSeconds
from jaxpipe.schedule import FAMILIES, ScheduleError, ScheduleVariant, VariantSizes, find_family


@dataclass(frozen=True)
class Candidate:
    """What a configuration would run under a variant.

    `configured`: whether it is the configuration's own schedule, exactly as a run has it.
    """

    variant: ScheduleVariant
    choice: Choice
    configured: bool = False

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.variant.label


def tried(
    config: Config, seconds: OpSeconds, variant: ScheduleVariant, *, memory: float | None = None
) -> Candidate | str:
    """Return the candidate of a variant, or why the sizes forbid it; `memory` as in `chosen`.

    The configuration's own variant is exactly what a run executes, not one searched for `seconds`.
    """
    try:
        if variant == variant_of(config):
            return configured(config, memory=memory)
        return candidate(config, seconds, variant)
    except ScheduleError as error:
        return str(error)


def variants(config: Config) -> list[ScheduleVariant]:
    """All variants that a plan of the configuration tries, the configuration's own first."""
    own, sizes = variant_of(config), sizes_of(config)
    every = [v for family in FAMILIES.values() for v in family.variants(family.name, sizes)]
    return [own, *(variant for variant in every if variant != own)]


def sizes_of(config: Config) -> VariantSizes:
    """The sizes that decide which variants are worth a try."""
    parallel = config.parallel
    shared = parallel.ends_shared_by > 0
    return VariantSizes(parallel.pp, config.model.n_layers, parallel.slices, shared)


def variant_of(config: Config) -> ScheduleVariant:
    """The variant that a configuration names; raises `ScheduleError` for an unknown schedule."""
    parallel, family = config.parallel, find_family(config.parallel.schedule)
    return ScheduleVariant(
        family.name,
        virtual_stages=parallel.virtual_stages or family.default("virtual_stages"),
        memory_limit=parallel.memory_limit or family.default("memory_limit"),
        in_flight=parallel.in_flight or None,
        breadth=parallel.breadth or None,
    )


def configured(
    config: Config, *, platform: str | None = None, memory: float | None = None
) -> Candidate:
    """Return the configuration's own schedule, exactly as a run has it; `ScheduleError` if none.

    `platform` and `memory` as in `chosen`.
    """
    choice = chosen(config, platform=platform, memory=memory)
    return Candidate(variant_of(config), choice, configured=True)


def candidate(config: Config, seconds: OpSeconds, variant: ScheduleVariant) -> Candidate:
    """Search a variant for these costs; raises `ScheduleError` if the sizes forbid it."""
    named = _named(config, variant)
    return Candidate(variant, chosen(named, seconds=seconds, effort=QUICK))


def _named(config: Config, variant: ScheduleVariant) -> Config:
    """The configuration that names a variant; a layer list for other stages becomes "even"."""
    parallel, family = config.parallel, FAMILIES[variant.family]
    split, stages = parallel.layer_split, parallel.pp * (variant.virtual_stages or family.stages)
    fits = isinstance(split, str) or len(split) == stages
    parallel = msgspec.structs.replace(
        parallel,
        schedule=variant.family,
        schedule_file="",
        virtual_stages=variant.virtual_stages or 0,
        memory_limit=variant.memory_limit or "",
        in_flight=variant.in_flight or 0,
        breadth=variant.breadth or 0,
        layer_split=split if fits else "even",
    )
    return msgspec.structs.replace(config, parallel=parallel)
