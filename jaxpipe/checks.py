"""What no single field of a configuration shows: the rules across fields."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning import layers_of, schedule_of
from jaxpipe.schedule import NAMES, ScheduleError, lower


def validate(config: Config, *, devices: int | None = None) -> None:
    """Check what no single field shows; `devices` is how many there are, None if not yet known.

    Raises `ConfigError` at the first rule that is broken.
    """
    for check in (_check_mesh, _check_model, _check_pipeline, _check_rest):
        check(config)
    parallel = config.parallel
    wanted = parallel.pp * parallel.dp * parallel.tp
    if devices is not None and wanted != devices:
        raise ConfigError(
            f"parallel.pp={parallel.pp} x parallel.dp={parallel.dp} x parallel.tp={parallel.tp} "
            f"= {wanted} must equal the number of devices, {devices}: change one of them, or set "
            f"runtime.cpu_devices={wanted} to train on virtual CPU devices."
        )


def _check_mesh(config: Config) -> None:
    if config.parallel.tp != 1:
        raise ConfigError(
            f"parallel.tp={config.parallel.tp}: this version has no tensor parallelism; use "
            f"parallel.tp=1 and more parallel.pp or parallel.dp."
        )


def _check_model(config: Config) -> None:
    model = config.model
    if model.n_heads % model.n_kv_heads:
        raise ConfigError(
            f"model.n_heads={model.n_heads} must be a multiple of model.n_kv_heads="
            f"{model.n_kv_heads}: query heads share key/value heads in equal groups."
        )
    if not model.head_dim and model.d_model % model.n_heads:
        raise ConfigError(
            f"model.d_model={model.d_model} must be a multiple of model.n_heads={model.n_heads}: "
            f"change one, or give model.head_dim."
        )
    if model.head_size % 2:
        raise ConfigError(
            f"the width of a head is {model.head_size} but rotary positions turn pairs: use an "
            f"even model.head_dim."
        )
    if model.tie_embeddings:
        raise ConfigError(
            "model.tie_embeddings=true: this version trains untied heads only; set "
            "model.tie_embeddings=false."
        )


def _check_pipeline(config: Config) -> None:
    parallel, microbatches = config.parallel, config.train.grad_accum_steps
    if parallel.schedule.lower() not in NAMES:
        raise ConfigError(
            f"unknown parallel.schedule={parallel.schedule!r}: use one of {', '.join(NAMES)}."
        )
    if parallel.pp > config.model.n_layers:
        raise ConfigError(
            f"parallel.pp={parallel.pp} exceeds model.n_layers={config.model.n_layers}: every "
            f"stage needs a layer; use at most parallel.pp={config.model.n_layers}."
        )
    filled = parallel.schedule.lower() in ("gpipe", "bfs", "custom") or parallel.allow_underfilled
    if microbatches < parallel.pp and not filled:
        raise ConfigError(
            f"train.grad_accum_steps={microbatches} cannot fill parallel.pp={parallel.pp} under "
            f"{parallel.schedule}: use at least {parallel.pp}, or set "
            f"parallel.allow_underfilled=true to accept the bubble."
        )
    if (parallel.schedule.lower() == "custom") != bool(parallel.schedule_file):
        raise ConfigError(
            f"parallel.schedule={parallel.schedule!r} with parallel.schedule_file="
            f"{parallel.schedule_file!r}: a file goes with schedule='custom', and with it alone."
        )
    try:
        schedule = schedule_of(config)
        lower(schedule, in_flight=parallel.in_flight or None)
    except ScheduleError as error:
        raise ConfigError(f"parallel.schedule={parallel.schedule!r}: {error}") from error
    try:
        layers_of(config, schedule.stages)
    except ScheduleError as error:
        raise ConfigError(f"parallel.layer_split: {error}") from error


def _check_rest(config: Config) -> None:
    if config.optimizer.warmup_steps > config.train.steps:
        raise ConfigError(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} exceeds train.steps="
            f"{config.train.steps}: warm up for fewer steps or train longer."
        )
    if config.data.source == "file" and not config.data.path:
        raise ConfigError("data.source='file' needs data.path: give a .bin or .npy of token ids.")
    if config.data.source != "file" and (config.data.path or config.data.heldout_path):
        raise ConfigError(
            f"data.path and data.heldout_path are read only with data.source='file', but it is "
            f"{config.data.source!r}: set data.source=file or leave the paths out."
        )
