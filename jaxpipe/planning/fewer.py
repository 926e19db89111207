"""A run on fewer devices than its mesh has, after processes are lost (`runtime.min_devices`)."""

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.units import readable_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.resolve import RunPlan, resolve
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import may_shrink, resolve_sizes
from jaxpipe.runtime.environment import usable_share

_CHANGED = (("parallel", "pp"), ("parallel", "dp"), ("parallel", "dp_replicate"),
            ("train", "grad_accum_steps"))  # fmt: skip


def resolve_on_fewer(config: Config, devices: Devices) -> tuple[RunPlan, str]:
    """Return what a run executes on these devices, and a sentence on what it has changed.

    A run whose mesh has more devices takes the first of `smaller_meshes` that keeps all rules and,
    by its estimate, fits the memory of a device; `RunPlan.devices` are then those that it uses. The
    sentence is empty if nothing has changed.

    Raises `ConfigError` as `resolve` does, and if no smaller mesh is possible.
    """
    if devices.count is None or not may_shrink(config, devices.count):
        return resolve(config, devices), ""
    config, refusals = resolve_sizes(config, None), []
    for smaller in smaller_meshes(config, devices):
        try:
            plan = _resolve_fitting(smaller, devices)
        except ConfigError as refusal:
            refusals.append(str(refusal).rstrip("."))
        else:
            return plan, _describe(config, plan, devices)
    raise ConfigError(
        f"{devices.count} of the {config.parallel.devices} devices of {config.parallel.mesh} are "
        f"left, and no mesh of at least runtime.min_devices={config.runtime.min_devices} of them "
        f"has the same {config.tokens_per_step} tokens in a step"
        f"{f' ({refusals[0]})' if refusals else ''}: start more processes, lower "
        f"runtime.min_devices, or change parallel.dp x train.grad_accum_steps, which a smaller dp "
        f"must divide."
    )


def smaller_meshes(config: Config, devices: Devices) -> Iterator[Config]:
    """Yield a configuration on fewer devices, with the tokens of its step, the preferred first.

    First those with the pipeline ranks that it has and fewer replicas, which change least; then
    those with another pp, the most devices first and then the nearest pp. The microbatches of a
    step are shared out to the replicas that are left. tp, ep and cp stay, and so do, as far as
    whole groups of replicas are left, the replicas of a group (`parallel.dp_replicate`).

    Args:
      config: with concrete sizes.
      devices: those that are left; a mesh takes whole processes.
    """
    parallel, least, left = config.parallel, config.runtime.min_devices, devices.count or 0
    microbatches = parallel.dp * config.train.grad_accum_steps
    sizes = [
        (pp, dp)
        for pp in range(1, config.model.pipeline_layers + 1)
        for dp in range(1, parallel.dp + 1)
        if least <= pp * dp * parallel.tp <= left
        and pp * dp * parallel.tp % devices.per_process == 0
        and microbatches % dp == 0
    ]
    for pp, dp in sorted(
        sizes, key=lambda size: (size[0] != parallel.pp, -size[0] * size[1],
                                 abs(size[0] - parallel.pp), -size[0]),
    ):  # fmt: skip
        groups = max(dp * parallel.dp_replicate // parallel.dp, 1)
        yield structs.replace(
            config,
            parallel=structs.replace(parallel, pp=pp, dp=dp, dp_replicate=groups),
            train=structs.replace(config.train, grad_accum_steps=microbatches // dp),
        )


def _resolve_fitting(config: Config, devices: Devices) -> RunPlan:
    """Return the plan; raises `ConfigError` if it breaks a rule, or a device has too little memory.

    The number of virtual CPU devices is not checked: some of them stay unused.
    """
    check_settings(structs.replace(config, runtime=structs.replace(config.runtime, cpu_devices=0)))
    plan = resolve(config, replace(devices, count=config.parallel.devices))
    usable = (devices.memory or float("inf")) * usable_share()
    if (needed := plan.memory.total) > usable:
        raise ConfigError(
            f"{config.parallel.mesh} needs {readable_bytes(needed)} of a device, which has "
            f"{readable_bytes(usable)}"
        )
    return plan


def _describe(before: Config, plan: RunPlan, devices: Devices) -> str:
    """The sentence on what a smaller mesh has changed, and why."""
    changed = []
    for section, key in _CHANGED:
        old, new = (getattr(getattr(one, section), key) for one in (before, plan.config))
        if old != new:
            changed.append(f"{section}.{key}={new} instead of {old}")
    unused = (devices.count or 0) - plan.config.parallel.devices
    return (
        f"{devices.count} of {before.parallel.devices} devices are left (runtime.min_devices="
        f"{before.runtime.min_devices}): {', '.join(changed)}; a step keeps its "
        f"{before.tokens_per_step} tokens{f'; unused devices: {unused}' if unused else ''}"
    )
