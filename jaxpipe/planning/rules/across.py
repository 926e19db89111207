"""The static rules across settings, which need the configuration alone."""

from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning.rules.data import DATA_CHECKS
from jaxpipe.planning.rules.debug import check_debug
from jaxpipe.planning.rules.devices import check_packing
from jaxpipe.planning.rules.experts import check_experts
from jaxpipe.planning.rules.fp8 import check_fp8
from jaxpipe.planning.rules.fused import check_fused
from jaxpipe.planning.rules.lora import check_lora
from jaxpipe.planning.rules.losses import LOSS_CHECKS
from jaxpipe.planning.rules.pipeline import PIPELINE_CHECKS
from jaxpipe.planning.rules.run import RUN_CHECKS
from jaxpipe.planning.rules.sequences import SEQUENCE_CHECKS
from jaxpipe.planning.rules.sizes import check_count, may_shrink
from jaxpipe.runtime.processes import started


def check_settings(config: Config) -> None:
    """Check the static rules across settings, once, after a configuration has been read.

    The rules of sizes, devices and schedules are checked by `resolve`.

    Raises `ConfigError` at the first broken rule.
    """
    for check in CHECKS:
        check(config)


def _check_virtual_devices(config: Config) -> None:
    """Raise `ConfigError` if virtual CPU devices, which all processes have, do not fit the mesh."""
    devices = started() * config.runtime.cpu_devices
    if devices and not may_shrink(config, devices):
        check_count(config, devices, are_present=True)


def _check_batch(config: Config) -> None:
    """Raise `ConfigError` if the number of microbatches is given twice, or not at all.

    `train.grad_accum_steps` or `train.batch_tokens` must be given, and not both.
    """
    train = config.train
    if bool(train.grad_accum_steps) == bool(train.batch_tokens):
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} with train.batch_tokens="
            f"{train.batch_tokens}: give one of them, and leave the other out or 0."
        )


_READ_WITH = {  # settings that nothing reads unless another one is set, or has a value
    "lora.rank": ("lora.targets", "lora.dropout", "lora.adapter"),
    "train.loss='dpo'": ("preference.beta", "preference.label_smoothing"),
    "optimizer.name='muon'": ("optimizer.muon_lr",),
    "train.spike_sigma": ("train.spike_window", "train.spike_limit", "train.spike_rollbacks"),
    "train.corruption_check_every": ("train.on_corruption",),
    "train.evaluate_every": (
        "train.evaluate_limit", "train.evaluate_include_path", "train.evaluate_tokenizer",
    ),
    "train.variable_length=False": ("runtime.programs",),
    "log.profile_start": ("log.profile_steps",),
    "debug.print_messages": ("debug.ticks", "debug.pp_ranks"),
}  # fmt: skip


def _check_unread(config: Config) -> None:
    """Raise `ConfigError` if a setting was changed from its default that nothing reads.

    `lora.targets`, `lora.dropout` and `lora.adapter` need `lora.rank`.

    `preference.beta` and `preference.label_smoothing` need `train.loss='dpo'`.

    `optimizer.muon_lr` needs `optimizer.name='muon'`.

    `train.spike_window`, `train.spike_limit` and `train.spike_rollbacks` need `train.spike_sigma`.

    `train.on_corruption` needs `train.corruption_check_every`.

    `train.evaluate_limit`, `train.evaluate_include_path` and `train.evaluate_tokenizer` need
    `train.evaluate_every`.

    `runtime.programs` needs `train.variable_length=False`.

    `log.profile_steps` needs `log.profile_start`.

    `debug.ticks` and `debug.pp_ranks` need `debug.print_messages`.
    """
    for condition, names in _READ_WITH.items():
        needed, _, value = condition.partition("=")
        now, _ = _value_and_default(config, needed)
        if (repr(now) == value) if value else now:
            continue
        for name in names:
            given, default = _value_and_default(config, name)
            if given != default:
                raise ConfigError(
                    f"{name}={given!r} is read only with {condition}, but {needed} is {now!r}: set "
                    f"that, or leave {name} out."
                )


def _value_and_default(config: Config, name: str) -> tuple[Any, Any]:
    section, _, key = name.partition(".")
    record = getattr(config, section)
    return getattr(record, key), _defaults(type(record))[key]


@cache  # msgspec evaluates all annotations of the class
def _defaults(section: type[Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(section)}


def _check_model(config: Config) -> None:
    """Raise `ConfigError` if the model's sizes do not fit each other or tensor parallelism."""
    for sentence in config.model.broken_rules(config.parallel.tp):
        raise ConfigError(sentence)


def _check_sharding(config: Config) -> None:
    """Raise `ConfigError` if sequence parallelism or resharding has nothing to share.

    `parallel.sequence_parallel` needs a `parallel.tp` above 1.

    `parallel.reshard_after_forward=true` needs `parallel.zero_stage=3`.
    """
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel=true cuts the sequence over parallel.tp, which is 1: set "
            "parallel.tp, or leave sequence_parallel out."
        )
    if parallel.reshards and parallel.zero_stage < 3:
        raise ConfigError(
            f"parallel.reshard_after_forward=true needs parallel.zero_stage=3, but it is "
            f"{parallel.zero_stage}: below 3 parameters are full within a step."
        )


def _check_use(config: Config) -> None:
    """Raise `ConfigError` if loss chunks or a bubble log have no use.

    `train.loss_chunks` above 1 excludes `parallel.defer_embed_head`.

    `log.bubble_every` needs a `parallel.pp` above 1.
    """
    train = config.train
    if train.loss_chunks > 1 and config.parallel.defer_embed_head:
        raise ConfigError(
            f"train.loss_chunks={train.loss_chunks} makes the head's gradient with the loss, but "
            f"parallel.defer_embed_head=true lets it wait: use one of them."
        )
    if config.log.bubble_every and config.parallel.pp == 1:
        raise ConfigError(
            f"log.bubble_every={config.log.bubble_every} with parallel.pp=1: without a pipeline "
            f"there is no bubble; leave it out."
        )


CHECKS = (
    check_packing,
    _check_batch,
    _check_unread,
    *SEQUENCE_CHECKS,
    check_experts,
    _check_model,
    _check_sharding,
    check_fp8,
    check_lora,
    *LOSS_CHECKS,
    *PIPELINE_CHECKS,
    check_fused,
    _check_use,
    *DATA_CHECKS,
    *RUN_CHECKS,
    check_debug,
    _check_virtual_devices,
)
