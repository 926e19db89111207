"""What no single field of a configuration shows: the rules across fields."""

from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.units import readable_bytes
from jaxpipe.model.family import INT32_MAX
from jaxpipe.planning import chosen
from jaxpipe.planning.data_checks import check_data
from jaxpipe.planning.debug_checks import check_debug
from jaxpipe.planning.expert_checks import check_experts
from jaxpipe.planning.fp8_checks import check_fp8
from jaxpipe.planning.fused_checks import check_fused
from jaxpipe.planning.hardware import read_measured
from jaxpipe.planning.sequence_checks import check_sequences
from jaxpipe.runtime.devices import compute_capability, host_memory
from jaxpipe.runtime.processes import started
from jaxpipe.schedule import FAMILIES, ScheduleError

_MOST_FORWARDS = 2**16  # of a schedule, which is built and proved action by action


def validate(
    config: Config,
    *,
    devices: int | None = None,
    devices_of_host: int | None = None,
    platform: str | None = None,
    memory: float | None = None,
) -> None:
    """Check what no single field shows; of devices, and the bytes of one, None is not yet known.

    Raises `ConfigError` at the first rule that is broken.
    """
    if config.runtime.cpu_devices:
        platform = "cpu"
    if platform:
        _check_platform(config, platform)
    if config.data.documents:
        _check_packing(config, platform)
    check_sizes(config)
    check_fp8(config, platform)
    _check_pipeline(config)
    if platform is not None or config.parallel.memory_limit != "auto":
        _check_schedule(config, platform, memory)
    check_fused(config)
    for check in (_check_rest, check_data, _check_optimizer, _check_start, _check_log, check_debug):
        check(config)
    parallel = config.parallel
    if devices_of_host is not None and devices_of_host % parallel.tp:
        raise ConfigError(
            f"parallel.tp={parallel.tp} must divide the {devices_of_host} devices of a host: those "
            f"that share a layer exchange values within it; use a smaller tp and more pp."
        )
    _check_memory(config, devices, platform, memory)
    wanted = parallel.pp * parallel.dp * parallel.tp
    if devices is not None and wanted != devices:
        raise ConfigError(
            f"parallel.pp={parallel.pp} x parallel.dp={parallel.dp} x parallel.tp={parallel.tp} "
            f"= {wanted} must equal the number of devices, {devices}: change one of them, or set "
            f"runtime.cpu_devices={wanted} to train on virtual CPU devices."
        )


def _check_platform(config: Config, platform: str) -> None:
    for sentence in config.model.unmet_needs(platform):
        raise ConfigError(sentence)
    if config.train.deterministic and platform != "cpu":
        from jaxpipe.runtime.compiler import check_deterministic  # needs jax

        check_deterministic(platform)
    if config.parallel.rings and platform != "cpu":
        from jaxpipe.runtime.compiler import check_rings

        check_rings(platform)


def _check_memory(
    config: Config, devices: int | None, platform: str | None, memory: float | None
) -> None:
    """Raise `ConfigError` where all devices together cannot hold one copy of the model."""
    held = host_memory() * started() if platform == "cpu" else (devices or 0) * (memory or 0)
    needed = 8 * config.model.parameter_count()
    if held and needed > held:
        raise ConfigError(
            f"model of {config.model.parameter_count():,} parameters: their float32 values and "
            f"gradients alone take {readable_bytes(needed)}, but the devices have "
            f"{readable_bytes(held)} together; make [model] smaller, or use more devices."
        )


def _check_packing(config: Config, platform: str | None) -> None:
    """Raise `ConfigError` where a token would see other documents of its row."""
    capability = compute_capability() if platform in ("gpu", "cuda") else None
    rows, dtype = (config.train.microbatch_size, config.train.seq_len), config.train.compute_dtype
    unmet = config.model.unmet_by_packing(capability, rows, dtype=dtype, tp=config.parallel.tp)
    for sentence in unmet:
        raise ConfigError(sentence)


def filled(config: Config, devices: int | None) -> Config:
    """The configuration with what follows from other settings filled in.

    That is the replicas that so many devices hold, where `parallel.dp` is -1, which without a
    number stays so; and the microbatches that `train.batch_tokens` makes of a step.

    Raises `ConfigError` where devices or tokens would be left over.
    """
    parallel = config.parallel
    if parallel.dp == -1 and devices is not None:
        each = parallel.pp * parallel.tp
        if devices < each or devices % each:
            raise ConfigError(
                f"parallel.dp=-1 takes all {devices} devices, which are not a multiple of "
                f"parallel.pp={parallel.pp} x parallel.tp={parallel.tp} = {each}: change one of "
                f"them, or give parallel.dp."
            )
        config = replace(config, parallel=replace(parallel, dp=devices // each))
    return _with_microbatches(config)


def _with_microbatches(config: Config) -> Config:
    parallel, train = config.parallel, config.train
    if train.grad_accum_steps or not train.batch_tokens or parallel.dp < 1:
        return config
    one = replace(config, train=replace(train, grad_accum_steps=1, batch_tokens=0))
    microbatches, rest = divmod(train.batch_tokens, one.tokens_per_step)
    if rest or not microbatches:
        near = max(microbatches, 1) * one.tokens_per_step
        raise ConfigError(
            f"train.batch_tokens={train.batch_tokens} is no multiple of the {one.tokens_per_step} "
            f"tokens of a microbatch (train.microbatch_size={train.microbatch_size} x "
            f"train.seq_len={train.seq_len} on each of {parallel.dp // parallel.cp} replicas): "
            f"give {near}, or change one of them."
        )
    return replace(one, train=replace(one.train, grad_accum_steps=microbatches))


def _check_replicas(config: Config) -> None:
    """Raise `ConfigError` where the number of replicas is none, or still to be filled."""
    if config.parallel.dp < 1:
        raise ConfigError(
            f"parallel.dp={config.parallel.dp}: give at least 1; or -1 for all devices that there "
            f"are, to commands that know them: train, profile, and plan with --devices."
        )


def check_sizes(config: Config) -> None:
    """Raise `ConfigError` where sizes of model, mesh and batch break a rule between them."""
    parallel, tp = config.parallel, config.parallel.tp
    _check_replicas(config)
    _check_batch(config)
    check_sequences(config)
    _check_weights(config)
    _check_limit(config)
    check_experts(config)
    if parallel.vocab_parallel_pp is True:
        _check_vocab_parallel(config)
    for sentence in config.model.broken_rules(tp):
        raise ConfigError(sentence)
    if parallel.sequence_parallel and tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel=true cuts the sequence over parallel.tp, which is 1: set "
            "parallel.tp, or leave sequence_parallel out."
        )
    if parallel.reshards and parallel.zero_stage < 3:
        raise ConfigError(
            f"parallel.reshard_after_forward=true needs parallel.zero_stage=3, but it is "
            f"{parallel.zero_stage}: below 3 parameters are whole within a step."
        )


def _check_batch(config: Config) -> None:
    """A step has microbatches, given or filled in, that one can count and schedule."""
    parallel, train = config.parallel, config.train
    if bool(train.grad_accum_steps) == bool(train.batch_tokens):
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} with train.batch_tokens="
            f"{train.batch_tokens}: give one of them, and leave the other out or 0."
        )
    if config.tokens_per_step > INT32_MAX:
        raise ConfigError(
            f"a step of {config.tokens_per_step} tokens (train.grad_accum_steps="
            f"{train.grad_accum_steps} x train.microbatch_size={train.microbatch_size} x "
            f"train.seq_len={train.seq_len} on {parallel.dp // parallel.cp} replicas) exceeds "
            f"2^31 - 1, as far as its targets are counted: make one of them smaller."
        )
    stages = parallel.pp * max(parallel.virtual_stages, 1)
    forwards = train.grad_accum_steps * parallel.slices * stages * train.fused_steps
    if forwards > _MOST_FORWARDS:
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} x parallel.slices={parallel.slices} "
            f"on {stages} stages x train.fused_steps={train.fused_steps} are {forwards} forwards, "
            f"but a schedule has at most {_MOST_FORWARDS}: use fewer microbatches, and a larger "
            f"train.microbatch_size."
        )


def _check_weights(config: Config) -> None:
    """Weights of the ends steer the weighted split alone, and that only where nothing is pinned."""
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


def _check_limit(config: Config) -> None:
    limit = config.parallel.memory_limit
    if isinstance(limit, float | int) and limit <= 0:
        raise ConfigError(
            f"parallel.memory_limit={limit:g} must be above 0, as a number of microbatches in a "
            f"stage: raise it, or leave it out for no limit."
        )


def _check_vocab_parallel(config: Config) -> None:
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


def _check_pipeline(config: Config) -> None:
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
    slices, may_underfill = parallel.slices, family.underfills or parallel.allow_underfilled
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
    if family.takes("path") != bool(parallel.schedule_file):
        raise ConfigError(
            f"parallel.schedule={parallel.schedule!r} with parallel.schedule_file="
            f"{parallel.schedule_file!r}: a file goes with schedule='custom', and with it alone."
        )


def _check_schedule(config: Config, platform: str | None, memory: float | None) -> None:
    """Raise `ConfigError` where there is no such schedule, or none that the scan can run."""
    try:
        _ = chosen(config, platform=platform, memory=memory).tables
    except ScheduleError as error:
        raise ConfigError(f"parallel.schedule={config.parallel.schedule!r}: {error}") from error


def _check_rest(config: Config) -> None:
    train, costs = config.train, config.parallel.costs
    if costs not in ("", "measure"):
        read_measured(Path(costs))  # whether or not the schedule is one that asks for it
    if train.loss_chunks > 1 and config.parallel.defer_ends:
        raise ConfigError(
            f"train.loss_chunks={train.loss_chunks} makes the head's gradient with the loss, but "
            f"parallel.defer_ends=true lets it wait: use one of them."
        )
    if config.log.bubble_every and config.parallel.pp == 1:
        raise ConfigError(
            f"log.bubble_every={config.log.bubble_every} with parallel.pp=1: without a pipeline "
            f"there is no bubble; leave it out."
        )


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.muon_lr and optimizer.name != "muon":
        raise ConfigError(
            f"optimizer.muon_lr={optimizer.muon_lr} is read only with optimizer.name='muon', but "
            f"it is {optimizer.name!r}: leave muon_lr out."
        )
    free = optimizer.name == "schedule_free"
    if free and (optimizer.decay != "constant" or not optimizer.beta1):
        raise ConfigError(
            f"optimizer.name='schedule_free' averages in place of a decay, with the weight beta1, "
            f"but optimizer.decay={optimizer.decay!r} and optimizer.beta1={optimizer.beta1}: set "
            f"decay=constant, and a beta1 above 0."
        )


def _check_start(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.exclude and checkpoint.resume in ("auto", "none"):
        raise ConfigError(
            f"checkpoint.exclude={list(checkpoint.exclude)} is of the checkpoint that "
            f"checkpoint.resume names, but that is {checkpoint.resume!r}: give its path, or leave "
            f"exclude out."
        )
    fields = [f"model.{name}" for name in type(config.model).__struct_fields__]
    for key in checkpoint.allow_changed:
        if key not in fields:
            raise ConfigError(
                f"checkpoint.allow_changed has {key!r}, but what it may name are the fields "
                f"{', '.join(fields)}."
            )


def _check_log(config: Config) -> None:
    # A folder named wandb, as wandb leaves them, is found too, but without an origin.
    found = find_spec("wandb") if config.log.wandb else None
    if config.log.wandb and (found is None or found.origin is None):
        raise ConfigError(
            f"log.wandb={config.log.wandb!r} needs the package wandb, which is not installed: "
            f"pip install wandb, or leave log.wandb out."
        )
    if config.log.profile_start and config.log.bubble_every:
        raise ConfigError(
            f"log.profile_start={config.log.profile_start} and log.bubble_every="
            f"{config.log.bubble_every} both record steps, and jax records one at a time: leave "
            f"one of them out."
        )
    if config.log.profile_start > config.train.steps:
        raise ConfigError(
            f"log.profile_start={config.log.profile_start} is past train.steps="
            f"{config.train.steps}: record an earlier step, or train longer."
        )
