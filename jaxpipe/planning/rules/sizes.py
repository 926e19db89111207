"""Sizes that follow from the number of devices, and the rules of replicas and batch."""

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.rules import check_rules
from jaxpipe.model.family import INT32_MAX
from jaxpipe.planning.rules.experts import check_experts
from jaxpipe.runtime.processes import started
from jaxpipe.schedules import find_family

_MOST_FORWARDS = 2**16  # a schedule is built and validated action by action


def resolve_sizes(config: Config, devices: int | None, *, are_present: bool = False) -> Config:
    """Return the configuration with concrete replicas and microbatches, and check their rules.

    With `parallel.dp` = -1, dp becomes the number of replicas that the devices hold; None: their
    number is not known. A given `train.batch_tokens` becomes a number of microbatches per step.
    `are_present`: whether the devices are there, not ones that a plan assumes.

    Raises `ConfigError` if the sizes are not known or break a rule.
    """
    parallel = config.parallel
    if parallel.dp == -1 and devices is not None:
        check_count(config, devices)
        dp = devices // (parallel.pp * parallel.tp)
        config = replace(config, parallel=replace(parallel, dp=dp))
        check_rules(config)  # those of dp
        check_experts(config)
    _check_replicas(config)
    config = _with_microbatches(config)
    _check_batch(config)
    check_filling(config)
    if devices is not None:
        check_count(config, devices, are_present=are_present)
    return config


def may_shrink(config: Config, devices: int) -> bool:
    """Whether a run whose mesh has more devices may start on `devices` (`runtime.min_devices`)."""
    least = config.runtime.min_devices
    return 0 < least <= devices < config.parallel.devices


def check_count(config: Config, devices: int, *, are_present: bool = False) -> None:
    """Raise `ConfigError` if the mesh does not have as many devices as there are.

    `parallel.pp` x `parallel.dp` x `parallel.tp` must equal the number of devices.

    `parallel.dp=-1` needs a number of devices that is a multiple of `parallel.pp` x `parallel.tp`.
    """
    parallel = config.parallel
    each = parallel.pp * parallel.tp
    if parallel.dp == -1:
        if devices < each or devices % each:
            raise ConfigError(
                f"parallel.dp=-1 takes all {devices} devices, which are not a multiple of "
                f"parallel.pp={parallel.pp} x parallel.tp={parallel.tp} = {each}: change one of "
                f"them, or give parallel.dp."
            )
    elif (wanted := parallel.devices) != devices:
        least = config.runtime.min_devices
        falls = f", which may fall to runtime.min_devices={least}" if least else ""
        virtual = _virtual_devices_remedy(config) if are_present else ""
        raise ConfigError(
            f"parallel.pp={parallel.pp} x parallel.dp={parallel.dp} x parallel.tp={parallel.tp} "
            f"= {wanted} must equal the number of devices, {devices}{falls}: change one of them"
            f"{virtual}."
        )


def _virtual_devices_remedy(config: Config) -> str:
    """Words on the virtual CPU devices of each process that make the mesh; "" if none do."""
    processes = started()
    each, rest = divmod(config.parallel.devices, processes)
    if rest or each == config.runtime.cpu_devices:
        return ""
    of_each = f" in each of {processes} processes" if processes > 1 else ""
    return f", or set runtime.cpu_devices={each} to train on virtual CPU devices{of_each}"


def _check_replicas(config: Config) -> None:
    """Raise `ConfigError` if the number of replicas is not known.

    `parallel.dp` must be at least 1; -1, for all devices, only where the command knows their
    number: train, profile, and plan with `--devices`.
    """
    parallel = config.parallel
    if parallel.dp < 1:
        raise ConfigError(
            f"parallel.dp={parallel.dp}: give at least 1; or -1 for all devices that there "
            f"are, to commands that know them: train, profile, and plan with --devices."
        )


def _with_microbatches(config: Config) -> Config:
    """Return the configuration with the microbatches per step that `train.batch_tokens` makes.

    `train.batch_tokens` must be a multiple of the tokens of a microbatch over all devices:
    `train.microbatch_size` x `train.seq_len` x `parallel.dp` / `parallel.cp`.
    """
    parallel, train = config.parallel, config.train
    if not train.batch_tokens:
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


def _check_batch(config: Config) -> None:
    """Raise `ConfigError` if the tokens or microbatches of a step are too many to count.

    `train.grad_accum_steps` x `train.microbatch_size` x `train.seq_len` x `parallel.dp` /
    `parallel.cp`, the tokens of a step, must be less than 2^31.

    `train.grad_accum_steps` x `parallel.slices` x stages x `train.fused_steps`, the forwards of a
    schedule, must be at most 65,536.
    """
    parallel, train = config.parallel, config.train
    if config.tokens_per_step > INT32_MAX:
        raise ConfigError(
            f"a step of {config.tokens_per_step} tokens (train.grad_accum_steps="
            f"{train.grad_accum_steps} x train.microbatch_size={train.microbatch_size} x "
            f"train.seq_len={train.seq_len} on {parallel.dp // parallel.cp} replicas) exceeds "
            f"2^31 - 1, as far as its targets are counted: make one of them smaller."
        )
    stages = parallel.pp * (parallel.virtual_stages or find_family(parallel.schedule).stages)
    forwards = config.scheduled_microbatches * stages * train.fused_steps
    if forwards > _MOST_FORWARDS:
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} x parallel.slices={parallel.slices} "
            f"on {stages} stages x train.fused_steps={train.fused_steps} are {forwards} forwards, "
            f"but a schedule has at most {_MOST_FORWARDS}: use fewer microbatches, and a larger "
            f"train.microbatch_size."
        )


def check_filling(config: Config) -> None:
    """Raise `ConfigError` if microbatches are too few to keep all pipeline ranks busy.

    `train.grad_accum_steps` x `parallel.slices` must be at least `parallel.pp`, unless the schedule
    runs with fewer microbatches or `parallel.allow_underfilled` is set.
    """
    parallel, microbatches = config.parallel, config.train.grad_accum_steps
    slices = parallel.slices
    may_underfill = find_family(parallel.schedule).may_underfill or parallel.allow_underfilled
    if config.scheduled_microbatches < parallel.pp and not may_underfill:
        cut = f" of parallel.slices={slices}" if slices > 1 else ""
        raise ConfigError(
            f"train.grad_accum_steps={microbatches}{cut} cannot fill parallel.pp={parallel.pp} "
            f"under {parallel.schedule}: use at least {-(-parallel.pp // slices)}, or set "
            f"parallel.allow_underfilled=true to accept the bubble."
        )


CHECKS = (check_count, _check_replicas, _with_microbatches, _check_batch, check_filling)
