"""The rules across settings, which no single field of a configuration shows."""

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.units import readable_bytes
from jaxpipe.model.decoder_config import DecoderConfig, unmet_by_kernel, unmet_by_packed_kernel
from jaxpipe.model.family import INT32_MAX, ModelConfig
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.moe.config import MixtureConfig
from jaxpipe.planning.data_checks import DATA_CHECKS, check_data
from jaxpipe.planning.debug_checks import check_debug
from jaxpipe.planning.expert_checks import check_experts
from jaxpipe.planning.fp8_checks import check_fp8
from jaxpipe.planning.fused_checks import check_fused
from jaxpipe.planning.hardware import read_measured
from jaxpipe.planning.pipeline_checks import (
    check_limit,
    check_pipeline,
    check_schedule,
    check_vocab_parallel,
    check_weights,
)
from jaxpipe.planning.run_checks import RUN_CHECKS
from jaxpipe.planning.sequence_checks import SEQUENCE_CHECKS, check_sequences
from jaxpipe.runtime.devices import compute_capability, host_memory
from jaxpipe.runtime.processes import started

_MOST_FORWARDS = 2**16  # a schedule is built and validated action by action


def validate(
    config: Config,
    *,
    devices: int | None = None,
    devices_of_host: int | None = None,
    platform: str | None = None,
    memory: float | None = None,
) -> None:
    """Check the rules across settings; an argument that is None is not known yet.

    Args:
      config: filled in by `filled`.
      devices: number of devices.
      devices_of_host: number of devices of one host.
      platform: platform of the devices, such as "cpu" or "gpu".
      memory: bytes of a device.

    Raises `ConfigError` at the first broken rule.
    """
    if config.runtime.cpu_devices:
        platform = "cpu"
    if platform:
        _check_platform(config, platform)
    if config.data.documents:
        _check_packing(config, platform)
    check_sizes(config)
    check_fp8(config, platform)
    check_pipeline(config)
    if platform is not None or config.parallel.memory_limit != "auto":
        check_schedule(config, platform, memory)
    check_fused(config)
    for check in (_check_rest, check_data, *RUN_CHECKS, check_debug):
        check(config)
    if devices_of_host is not None:
        _check_host(config, devices_of_host)
    _check_memory(config, devices, platform, memory)
    if devices is not None:
        _check_devices(config, devices)


def _check_host(config: Config, devices_of_host: int) -> None:
    """Raise `ConfigError` if devices of several hosts would share a layer.

    `parallel.tp` must divide the number of devices of a host.
    """
    tp = config.parallel.tp
    if devices_of_host % tp:
        raise ConfigError(
            f"parallel.tp={tp} must divide the {devices_of_host} devices of a host: those "
            f"that share a layer exchange values within it; use a smaller tp and more pp."
        )


def _check_devices(config: Config, devices: int) -> None:
    """Raise `ConfigError` if the size of the mesh is not the number of devices.

    `parallel.pp` x `parallel.dp` x `parallel.tp` must equal the number of devices.
    """
    parallel = config.parallel
    wanted = parallel.pp * parallel.dp * parallel.tp
    if wanted != devices:
        raise ConfigError(
            f"parallel.pp={parallel.pp} x parallel.dp={parallel.dp} x parallel.tp={parallel.tp} "
            f"= {wanted} must equal the number of devices, {devices}: change one of them, or set "
            f"runtime.cpu_devices={wanted} to train on virtual CPU devices."
        )


def _check_platform(config: Config, platform: str) -> None:
    """Raise `ConfigError` if devices of this platform lack what settings need.

    `train.deterministic` and `parallel.cp_method='ring'` need, on GPUs, an XLA that has the options
    that they set, and an `XLA_FLAGS` that does not set these too.
    """
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
    """Raise `ConfigError` if all devices together cannot hold one copy of the model.

    `model.n_layers`, `model.d_model` and the other sizes may make at most as many parameters as all
    devices together can hold with their gradients, 8 bytes each.
    """
    held = host_memory() * started() if platform == "cpu" else (devices or 0) * (memory or 0)
    needed = 8 * config.model.parameter_count()
    if held and needed > held:
        raise ConfigError(
            f"model of {config.model.parameter_count():,} parameters: their float32 values and "
            f"gradients alone take {readable_bytes(needed)}, but the devices have "
            f"{readable_bytes(held)} together; make [model] smaller, or use more devices."
        )


def _check_packing(config: Config, platform: str | None) -> None:
    """Raise `ConfigError` if a token could attend to other documents of its row."""
    capability = compute_capability() if platform in ("gpu", "cuda") else None
    rows, dtype = (config.train.microbatch_size, config.train.seq_len), config.train.compute_dtype
    unmet = config.model.unmet_by_packing(capability, rows, dtype=dtype, tp=config.parallel.tp)
    for sentence in unmet:
        raise ConfigError(sentence)


def filled(config: Config, devices: int | None) -> Config:
    """Return the configuration with the settings filled in that follow from others.

    With `parallel.dp` = -1 and a number of devices, dp becomes the number of replicas that they
    hold. A given `train.batch_tokens` becomes a number of microbatches per step.

    `parallel.dp=-1` needs a number of devices that is a multiple of `parallel.pp` x `parallel.tp`.

    Raises `ConfigError` if devices or tokens would be left over.
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
    """Return the configuration with the microbatches per step that `train.batch_tokens` makes.

    `train.batch_tokens` must be a multiple of the tokens of a microbatch over all devices:
    `train.microbatch_size` x `train.seq_len` x `parallel.dp` / `parallel.cp`.
    """
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
    """Raise `ConfigError` if the number of replicas is below 1, or is still to be filled in.

    `parallel.dp` must be at least 1; -1, for all devices, only where the command knows their
    number: train, profile, and plan with `--devices`.
    """
    if config.parallel.dp < 1:
        raise ConfigError(
            f"parallel.dp={config.parallel.dp}: give at least 1; or -1 for all devices that there "
            f"are, to commands that know them: train, profile, and plan with --devices."
        )


def check_sizes(config: Config) -> None:
    """Raise `ConfigError` if sizes of model, mesh and batch break a rule between them.

    `parallel.sequence_parallel` needs a `parallel.tp` above 1.

    `parallel.reshard_after_forward=true` needs `parallel.zero_stage=3`.
    """
    parallel, tp = config.parallel, config.parallel.tp
    _check_replicas(config)
    _check_batch(config)
    check_sequences(config)
    check_weights(config)
    check_limit(config)
    check_experts(config)
    if parallel.vocab_parallel_pp is True:
        check_vocab_parallel(config)
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
    """Raise `ConfigError` if a step has no microbatches, or too many to count and schedule.

    `train.grad_accum_steps` or `train.batch_tokens` must be given, and not both.

    `train.grad_accum_steps` x `train.microbatch_size` x `train.seq_len` x `parallel.dp` /
    `parallel.cp`, the tokens of a step, must be less than 2^31.

    `train.grad_accum_steps` x `parallel.slices` x stages x `train.fused_steps`, the forwards of a
    schedule, must be at most 65,536.
    """
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


def _check_rest(config: Config) -> None:
    """Raise `ConfigError` if op costs cannot be read, or loss chunks or a bubble log have no use.

    `parallel.costs` must be empty, `measure`, or a file of measured op seconds.

    `train.loss_chunks` above 1 excludes `parallel.defer_ends`.

    `log.bubble_every` needs a `parallel.pp` above 1.
    """
    train, costs = config.train, config.parallel.costs
    if costs not in ("", "measure"):
        read_measured(Path(costs))  # also if the schedule does not use them
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


# The functions whose docstrings state the rules, in paragraphs that begin with a setting; in the
# order in which `validate` checks them, after `filled`. `jaxpipe.planning.rules` prints the rules.
RULES: tuple[Callable[..., object], ...] = (
    filled,
    _with_microbatches,
    _check_platform,
    DecoderConfig.unmet_needs,
    _check_packing,
    ModelConfig.unmet_by_packing,
    DecoderConfig.unmet_by_packing,
    unmet_by_kernel,
    unmet_by_packed_kernel,
    _check_replicas,
    _check_batch,
    *SEQUENCE_CHECKS,
    ModelConfig.unmet_by_context,
    DecoderConfig.unmet_by_context,
    DecoderConfig._unmet_by_fused_ring,
    DecoderConfig._unmet_by_exchange,
    check_weights,
    check_limit,
    check_experts,
    check_vocab_parallel,
    DecoderConfig.unequal_parts,
    MixtureConfig._unread,
    MixtureConfig.broken_mixture_rules,
    LlamaConfig.broken_rules,
    check_sizes,
    check_fp8,
    check_pipeline,
    check_schedule,
    check_fused,
    _check_rest,
    *DATA_CHECKS,
    *RUN_CHECKS,
    check_debug,
    _check_host,
    _check_memory,
    _check_devices,
)
