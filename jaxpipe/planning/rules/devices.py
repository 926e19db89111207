"""Rules of the devices of a run, which are checked when they are known."""

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.units import readable_bytes
from jaxpipe.planning.cost.costs import ITEMSIZE
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.rules.sequences import check_attention
from jaxpipe.runtime.devices import host_memory
from jaxpipe.runtime.processes import started

_FP8_CAPABILITY = 8.9  # Ada, then Hopper: the first GPUs with products of 8-bit floats


def check_devices(config: Config, devices: Devices, *, trains: bool = True) -> None:
    """Raise `ConfigError` at the first rule of a configuration that the devices break."""
    _check_platform(config, devices)
    if devices.capability is not None:
        _check_fp8(config, devices.capability)
    if devices.per_host is not None:
        _check_host(config, devices.per_host)
    _check_memory(config, devices, trains=trains)


def _check_platform(config: Config, devices: Devices) -> None:
    """Raise `ConfigError` if devices of this platform lack what settings need.

    `train.deterministic` and `parallel.cp_method='ring'` need, on GPUs, an XLA that has the options
    that they set, and an `XLA_FLAGS` that does not set these too.
    """
    check_attention(config, devices)
    if devices.on_cpu or devices.count is None:
        return
    from jaxpipe.runtime.programs.compiler import check_deterministic, check_rings  # need jax

    if config.train.deterministic:
        check_deterministic(devices.platform)
    if config.parallel.rings:
        check_rings(devices.platform)


def _check_fp8(config: Config, capability: float) -> None:
    """Raise `ConfigError` if the GPUs cannot multiply 8-bit floats.

    `train.fp8` needs GPUs of compute capability 8.9 or later, if the devices are GPUs.
    """
    fp8 = config.train.fp8
    if fp8 != "none" and capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"train.fp8={fp8!r} needs GPUs of compute capability {_FP8_CAPABILITY} (Ada, "
            f"Hopper) or later, but these have {capability}: set train.fp8=none."
        )


def _check_host(config: Config, per_host: int) -> None:
    """Raise `ConfigError` if devices of several hosts would share a layer.

    `parallel.tp` must divide the number of devices of a host.
    """
    tp = config.parallel.tp
    if per_host % tp:
        raise ConfigError(
            f"parallel.tp={tp} must divide the {per_host} devices of a host: those "
            f"that share a layer exchange values within it; use a smaller tp and more pp."
        )


def _check_memory(config: Config, devices: Devices, *, trains: bool) -> None:
    """Raise `ConfigError` if all devices together cannot hold one copy of the model.

    `model.n_layers`, `model.d_model` and the other sizes may make at most as many parameters as all
    devices together can hold with their gradients, 8 bytes each; without gradients, as beside
    adapters and in inference, in `train.compute_dtype`.
    """
    dtype = config.train.compute_dtype
    size, what = ITEMSIZE[dtype], f"{dtype} values"
    if trains and not config.lora.rank:
        size, what = 8, "float32 values and gradients"
    of_all = (devices.count or 0) * (devices.memory or 0)
    available = host_memory() * started() if devices.on_cpu else of_all
    needed = size * config.model.parameter_count()
    if available and needed > available:
        raise ConfigError(
            f"model of {config.model.parameter_count():,} parameters: their {what} alone take "
            f"{readable_bytes(needed)}, but the devices have {readable_bytes(available)} together; "
            f"make [model] smaller, or use more devices."
        )


CHECKS = (_check_platform, _check_fp8, _check_host, _check_memory)
