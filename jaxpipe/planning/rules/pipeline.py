"""Rules of stages and schedules, and of layers that run in halves."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.schedules import find_family


def check_pipeline(config: Config) -> None:
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
            f"parallel.pp={parallel.pp} is too much for model.n_layers={config.model.n_layers}: "
            f"stages are made of {layers} layers; use at most parallel.pp={layers}."
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


def check_halves(config: Config) -> None:
    """Raise `ConfigError` if layers cannot run in halves, or would gain nothing.

    `parallel.overlap_halves=true` needs `parallel.tp`, `parallel.ep` or `parallel.cp` above 1.

    `parallel.overlap_halves=true` with an odd `train.microbatch_size` halves sequences, which
    excludes `parallel.slices` and `parallel.cp` above 1 and losses other than cross_entropy.
    """
    parallel, rows = config.parallel, config.train.microbatch_size
    if not parallel.overlap_halves:
        return
    if config.halves == "sequence":
        for name, value, plain, why in (
            ("parallel.slices", parallel.slices, 1, "slices are parts of sequences already"),
            ("parallel.cp", parallel.cp, 1, "replicas would wait for each other's halves in turn"),
            ("train.loss", config.train.loss, "cross_entropy", "it is of whole rows"),
        ):
            if value != plain:
                raise ConfigError(
                    f"parallel.overlap_halves=true with train.microbatch_size={rows} halves "
                    f"sequences, which {name}={value} excludes: {why}; use an even number of rows, "
                    f"such as {rows + 1}, or set parallel.overlap_halves=false."
                )
    if max(parallel.tp, parallel.ep, parallel.cp) == 1:
        raise ConfigError(
            "parallel.overlap_halves=true with parallel.tp=1, parallel.ep=1 and parallel.cp=1: "
            "layers have no collectives to hide; set parallel.overlap_halves=false."
        )
