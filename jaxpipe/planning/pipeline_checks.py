"""Rules of stages and schedules, and of embedding and head in a pipeline."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning import chosen
from jaxpipe.schedule import FAMILIES, ScheduleError


def check_weights(config: Config) -> None:
    """Raise `ConfigError` if weights of embedding and head would not change the layer split.

    `parallel.input_weight` and `parallel.output_weight` other than 1 need
    `parallel.layer_split='weighted'`, and neither `parallel.first_stage_layers` nor
    `parallel.last_stage_layers`.
    """
    parallel = config.parallel
    weights = parallel.input_weight, parallel.output_weight
    pinned = parallel.first_stage_layers or parallel.last_stage_layers
    if weights != (1, 1) and (pinned or parallel.layer_split != "weighted"):
        given = f"{parallel.layer_split!r}{' with pinned layers' if pinned else ''}"
        raise ConfigError(
            f"parallel.input_weight={weights[0]} and parallel.output_weight={weights[1]} count "
            f"only with parallel.layer_split='weighted' and no pinned layers, but it is {given}: "
            f"set it, or leave the weights out."
        )


def check_limit(config: Config) -> None:
    """Raise `ConfigError` if the limit on live activations allows none.

    `parallel.memory_limit`, given as a number of microbatches, must be above 0.
    """
    limit = config.parallel.memory_limit
    if isinstance(limit, float | int) and limit <= 0:
        raise ConfigError(
            f"parallel.memory_limit={limit:g} must be above 0, as a number of microbatches in a "
            f"stage: raise it, or leave it out for no limit."
        )


def check_vocab_parallel(config: Config) -> None:
    """Raise `ConfigError` if embedding and head cannot be vocabulary-parallel over pp.

    `parallel.vocab_parallel_pp=true` needs a `parallel.pp` above 1.

    `parallel.vocab_parallel_pp=true` excludes `parallel.defer_ends`.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        raise ConfigError(
            "parallel.vocab_parallel_pp=true cuts the vocabulary over parallel.pp, which is 1: set "
            "parallel.pp, or leave vocab_parallel_pp out."
        )
    if parallel.defer_ends:
        raise ConfigError(
            "parallel.vocab_parallel_pp=true with parallel.defer_ends=true: ends that all ranks "
            "share leave nothing to even out by waiting; use one of them."
        )


def check_pipeline(config: Config) -> None:
    """Raise `ConfigError` if the schedule is unknown, or stages or microbatches are too few.

    `parallel.schedule` must be the name of a schedule.

    `parallel.pp` must be at most `model.n_layers`.

    `train.grad_accum_steps` x `parallel.slices` must be at least `parallel.pp`, unless the schedule
    runs with fewer microbatches or `parallel.allow_underfilled` is set.

    `parallel.virtual_stages=1` excludes schedules that are for several stages on a rank.

    `parallel.schedule='custom'` needs `parallel.schedule_file`, and no other schedule takes one.
    """
    parallel, microbatches = config.parallel, config.train.grad_accum_steps
    family = FAMILIES.get(parallel.schedule.lower())
    if family is None:
        raise ConfigError(
            f"unknown parallel.schedule={parallel.schedule!r}: use one of {', '.join(FAMILIES)}."
        )
    if parallel.pp > config.model.n_layers:
        raise ConfigError(
            f"parallel.pp={parallel.pp} exceeds model.n_layers={config.model.n_layers}: every "
            f"stage needs a layer; use at most parallel.pp={config.model.n_layers}."
        )
    slices, may_underfill = (
        parallel.slices,
        family.may_underfill or parallel.allow_underfilled,
    )
    if microbatches * slices < parallel.pp and not may_underfill:
        cut = f" of parallel.slices={slices}" if slices > 1 else ""
        raise ConfigError(
            f"train.grad_accum_steps={microbatches}{cut} cannot fill parallel.pp={parallel.pp} "
            f"under {parallel.schedule}: use at least {-(-parallel.pp // slices)}, or set "
            f"parallel.allow_underfilled=true to accept the bubble."
        )
    several = family.default("virtual_stages") or 1
    if parallel.virtual_stages == 1 and several > 1:
        raise ConfigError(
            f"parallel.schedule={parallel.schedule!r} with parallel.virtual_stages=1: it is for "
            f"several stages a rank; use {several} or more, or a schedule with one, such as 1f1b."
        )
    if family.has_option("path") != bool(parallel.schedule_file):
        raise ConfigError(
            f"parallel.schedule={parallel.schedule!r} with parallel.schedule_file="
            f"{parallel.schedule_file!r}: a file goes with schedule='custom', and with it alone."
        )


def check_schedule(config: Config, platform: str | None, memory: float | None) -> None:
    """Raise `ConfigError` if the schedule does not exist, or the scan cannot run it.

    `parallel.schedule` must exist for the given `parallel.pp`, `parallel.virtual_stages`,
    `parallel.breadth`, `parallel.slices`, `parallel.in_flight` and microbatches, with
    `parallel.layer_split` giving every stage a layer, and fit within `parallel.memory_limit`.
    """
    try:
        _ = chosen(config, platform=platform, memory=memory).tables
    except ScheduleError as error:
        raise ConfigError(f"parallel.schedule={config.parallel.schedule!r}: {error}") from error
