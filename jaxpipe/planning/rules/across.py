"""The static rules across settings, which need the configuration alone."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.rules import check_rules
from jaxpipe.planning.rules.data import DATA_CHECKS
from jaxpipe.planning.rules.debug import check_debug
from jaxpipe.planning.rules.experts import check_experts
from jaxpipe.planning.rules.fp8 import check_fp8
from jaxpipe.planning.rules.fused import check_fused
from jaxpipe.planning.rules.lora import check_lora
from jaxpipe.planning.rules.losses import LOSS_CHECKS
from jaxpipe.planning.rules.pipeline import check_halves, check_pipeline
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


def check_batch(config: Config) -> None:
    """Raise `ConfigError` if the number of microbatches is given twice, or not at all.

    `train.grad_accum_steps` or `train.batch_tokens` must be given, and not both.
    """
    train = config.train
    if bool(train.grad_accum_steps) == bool(train.batch_tokens):
        raise ConfigError(
            f"train.grad_accum_steps={train.grad_accum_steps} with train.batch_tokens="
            f"{train.batch_tokens}: give one of them, and leave the other out or 0."
        )


def _check_model(config: Config) -> None:
    """Raise `ConfigError` if the model's sizes do not fit each other or tensor parallelism."""
    for sentence in config.model.broken_rules(config.parallel.tp):
        raise ConfigError(sentence)


CHECKS = (
    check_batch,
    check_rules,
    *SEQUENCE_CHECKS,
    check_experts,
    _check_model,
    check_fp8,
    check_lora,
    *LOSS_CHECKS,
    check_pipeline,
    check_halves,
    check_fused,
    *DATA_CHECKS,
    *RUN_CHECKS,
    check_debug,
    _check_virtual_devices,
)
