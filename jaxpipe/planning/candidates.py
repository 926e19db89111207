"""The schedules that a configuration could run: every family that its sizes allow."""

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.planning.cost.hardware import OpSeconds
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.loops import unroll_if_needed
from jaxpipe.planning.resolve import QUICK, RunPlan, arrange
from jaxpipe.planning.rules.fused import check_fused
from jaxpipe.schedules import FAMILIES, ScheduleVariant, VariantSizes, find_family


def variants(config: Config) -> list[ScheduleVariant]:
    """All variants that a plan of the configuration tries, the configuration's own first.

    One pipeline rank runs the same actions under any schedule, with least memory under 1F1B.
    """
    own, sizes = variant_of(config), sizes_of(config)
    if config.parallel.pp == 1:
        return list(dict.fromkeys((own, ScheduleVariant("1f1b"))))
    every = [v for family in FAMILIES.values() for v in family.variants(family.name, sizes)]
    return [own, *(variant for variant in every if variant != own)]


def sizes_of(config: Config) -> VariantSizes:
    """The sizes that decide which variants are worth a try."""
    parallel = config.parallel
    shared = parallel.vocab_shared_by > 0
    return VariantSizes(parallel.pp, config.model.pipeline_layers, parallel.slices, shared)


def variant_of(config: Config) -> ScheduleVariant:
    """The variant that a configuration names; raises `ScheduleError` for an unknown schedule."""
    parallel, family = config.parallel, find_family(config.parallel.schedule)
    return ScheduleVariant(
        family.name,
        virtual_stages=parallel.virtual_stages or family.options.get("virtual_stages"),
        memory_limit=parallel.memory_limit or family.options.get("memory_limit"),
        in_flight=parallel.in_flight or None,
        breadth=parallel.breadth or None,
    )


def arrange_variant(
    config: Config, devices: Devices, variant: ScheduleVariant, seconds: OpSeconds
) -> RunPlan:
    """Return the plan of a run under a variant, searched quickly for these seconds.

    The configuration's own variant is exactly what a run executes, not one searched for `seconds`.
    Raises `ScheduleError` if sizes or `train.fused_steps` forbid the variant, or if the
    configuration's own excludes the loop of `parallel.unroll_layers`.
    """
    if variant == variant_of(config):
        own = arrange(config, devices)
        try:
            _ = own.unroll_layers  # computed, and checked, when it is read
        except ConfigError as error:
            raise ScheduleError(str(error)) from error
        return own
    candidate = with_variant(config, variant)
    try:
        check_fused(candidate)
    except ConfigError as error:
        raise ScheduleError(str(error)) from error
    return unroll_if_needed(arrange(candidate, devices, seconds=seconds, effort=QUICK))


def with_variant(config: Config, variant: ScheduleVariant) -> Config:
    """The configuration that names a variant; a layer list for other stages becomes "even"."""
    parallel, family = config.parallel, FAMILIES[variant.family]
    split, stages = parallel.layer_split, parallel.pp * (variant.virtual_stages or family.stages)
    fits = isinstance(split, str) or len(split) == stages
    if variant == variant_of(config):
        return replace(config, parallel=replace(parallel, layer_split=split if fits else "even"))
    parallel = replace(
        parallel,
        schedule=variant.family,
        schedule_file="",
        virtual_stages=variant.virtual_stages or 0,
        memory_limit=variant.memory_limit or "",
        in_flight=variant.in_flight or 0,
        breadth=variant.breadth or 0,
        layer_split=split if fits else "even",
    )
    return replace(config, parallel=parallel)
