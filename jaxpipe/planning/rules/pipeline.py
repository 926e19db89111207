"""Rules of stages and schedules, and of embedding and head in a pipeline."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.schedules import find_family


def _check_weights(config: Config) -> None:
    """Raise `ConfigError` if weights of embedding and head would not change the layer split.

    `parallel.input_weight` and `parallel.output_weight` other than 1 need
    `parallel.layer_split='weighted'`, and neither `parallel.first_stage_layers` nor
    `parallel.last_stage_layers`.
    """
    parallel = config.parallel
    weights = parallel.input_weight, parallel.output_weight
    pinned = parallel.first_stage_layers or parallel.last_stage_layers
    if weights != (1, 1) and (pinned or parallel.layer_split != "weighted"):
        split = f"{parallel.layer_split!r}{' with pinned layers' if pinned else ''}"
        raise ConfigError(
            f"parallel.input_weight={weights[0]} and parallel.output_weight={weights[1]} count "
            f"only with parallel.layer_split='weighted' and no pinned layers, but it is {split}: "
            f"set it, or leave the weights out."
        )


def _check_balanced(config: Config) -> None:
    """Raise `ConfigError` if layers are both pinned and balanced.

    `parallel.layer_split='balanced'` excludes `parallel.first_stage_layers` and
    `parallel.last_stage_layers`.
    """
    parallel = config.parallel
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if parallel.layer_split == "balanced" and (first or last):
        raise ConfigError(
            f"parallel.layer_split='balanced' chooses the layers of every stage, also those of "
            f"parallel.first_stage_layers={first} and parallel.last_stage_layers={last}: leave "
            f"both out, or use layer_split='even'."
        )


def _check_limit(config: Config) -> None:
    """Raise `ConfigError` if the limit on live activations allows none.

    `parallel.memory_limit`, given as a number of microbatches, must be above 0.
    """
    limit = config.parallel.memory_limit
    if isinstance(limit, float | int) and limit <= 0:
        raise ConfigError(
            f"parallel.memory_limit={limit:g} must be above 0, as a number of microbatches in a "
            f"stage: raise it, or leave it out for no limit."
        )


def _check_vocab_parallel(config: Config) -> None:
    """Raise `ConfigError` if embedding and head cannot be vocabulary-parallel over pp.

    `parallel.vocab_parallel_pp=true` needs a `parallel.pp` above 1.

    `parallel.vocab_parallel_pp=true` excludes `parallel.defer_embed_head`.
    """
    parallel = config.parallel
    if parallel.vocab_parallel_pp is not True:
        return
    if parallel.pp == 1:
        raise ConfigError(
            "parallel.vocab_parallel_pp=true cuts the vocabulary over parallel.pp, which is 1: set "
            "parallel.pp, or leave vocab_parallel_pp out."
        )
    if parallel.defer_embed_head:
        raise ConfigError(
            "parallel.vocab_parallel_pp=true with parallel.defer_embed_head=true: an embedding "
            "and head that all ranks share leave nothing to even out by waiting; use one of them."
        )


def _check_pipeline(config: Config) -> None:
    """Raise `ConfigError` if the schedule is unknown, or its stages or file do not fit it.

    `parallel.schedule` must be the name of a schedule.

    `parallel.pp` must be at most `model.n_layers`.

    `parallel.virtual_stages=1` excludes schedules that are for several stages on a rank.

    `parallel.schedule='custom'` needs `parallel.schedule_file`, and no other schedule takes one.
    """
    parallel = config.parallel
    try:
        family = find_family(parallel.schedule)
    except ScheduleError as error:
        raise ConfigError(
            f"parallel.schedule: {str(error).removesuffix('.')}; custom reads the order in the "
            f"file parallel.schedule_file."
        ) from error
    layers = config.model.pipeline_layers
    if parallel.pp > layers:
        raise ConfigError(
            f"parallel.pp={parallel.pp} exceeds model.n_layers={layers}: every "
            f"stage needs a layer; use at most parallel.pp={layers}."
        )
    several = family.options.get("virtual_stages") or 1
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


PIPELINE_CHECKS = (
    _check_weights, _check_balanced, _check_limit, _check_vocab_parallel, _check_pipeline,
)  # fmt: skip
