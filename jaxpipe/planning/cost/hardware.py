"""Seconds of every op: from sizes and a device's data sheet, or measured and read from a file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from jaxpipe.config import Config, ConfigError, to_toml
from jaxpipe.planning.cost.collectives import resharding_of, sharing_of, tensor_of
from jaxpipe.planning.cost.costs import ITEMSIZE, LayerCosts, costs_of, essentials, recomputing
from jaxpipe.planning.cost.seconds import (
    NO_COPIES,
    NO_EXCHANGE,
    NO_RECOMPUTATION,
    Copies,
    LayerSeconds,
    LayerShare,
    OpSeconds,
    Recomputation,
)
from jaxpipe.runtime import processes
from jaxpipe.runtime.devices import DEVICES, Device
from jaxpipe.runtime.storage.files import AnyPath, open_path, write_whole

__all__ = [
    "ITEMSIZE", "NO_COPIES", "NO_EXCHANGE", "Copies", "Hardware", "LayerSeconds", "OpSeconds",
    "analytic", "op_seconds", "own_costs", "read_own", "sharing_of", "write_own",
]  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """A device, and its links to neighbours, to its host and to other replicas.

    `efficiency` is the share of the peak that ops reach; the bubble is not part of it.
    """

    device: str = "H100"
    efficiency: float = 0.5
    link: float = 50e9  # bytes per second to one neighbouring pipeline rank, one way
    host: float = 50e9  # bytes per second to or from the host, of the 63 GB/s of PCIe 5.0 x16
    network: float = 50e9  # bytes per second to other replicas: one 400 Gb/s port per device

    @property
    def within(self) -> float:
        """Bytes per second to another device of the host, one way."""
        return self._sheet.link

    @property
    def flops(self) -> float:
        """Dense bfloat16 FLOP/s that ops reach."""
        return self._sheet.flops * self.efficiency

    def seconds(self, flops: float, in_fp8: float) -> float:
        """Seconds of `flops` FLOPs, `in_fp8` of which are in 8-bit floats.

        Raises `ConfigError` if the device does not multiply 8-bit floats.
        """
        if not in_fp8:
            return flops / self.flops
        if not self._sheet.fp8:
            able = ", ".join(name for name, sheet in DEVICES.items() if sheet.fp8)
            raise ConfigError(
                f"train.fp8 with the device {self.device!r}, which does not multiply 8-bit floats: "
                f"use one of {able}, or set train.fp8=none."
            )
        return (flops - in_fp8) / self.flops + in_fp8 / (self._sheet.fp8 * self.efficiency)

    @property
    def _sheet(self) -> Device:
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}: use one of {', '.join(DEVICES)}.")
        return DEVICES[self.device]


def analytic(config: Config, hardware: Hardware) -> OpSeconds:
    """Compute seconds from FLOPs and bytes; a layer is the mean of the model's layers.

    The head is the full head, also where ranks share it.
    """
    costs = costs_of(config)

    def compute(op: str) -> float:
        return costs.mean(lambda kind: hardware.seconds(getattr(kind, op), kind.in_fp8[op]))

    return OpSeconds(
        layer=LayerSeconds(**{op: compute(op) for op in "FBWR"}),
        head=costs.head * max(1, config.parallel.vocab_shared_by) / hardware.flops,
        transfer=costs.message / hardware.link,
        copies=copies_of(config, hardware),
        again=recomputation_of(config, hardware),
        exchange=LayerSeconds(
            **{
                op: costs.mean(lambda kind, op=op: kind.exchanged[op]) / hardware.network
                for op in "FBWR"
            }
        ),
        sharing=sharing_of(config, hardware).beside(resharding_of(config, hardware)),
        tensor=tensor_of(config, hardware),
        **_rates(config, hardware),
    )  # fmt: skip


def _rates(config: Config, hardware: Hardware) -> dict[str, Any]:
    """The fields that measurements lack: shares of layers, and rates of the links of a step."""
    return {
        "shares": shares_of(config, hardware),
        "network": 1 / hardware.network,
        "host": 1 / hardware.host,
    }


def shares_of(config: Config, hardware: Hardware) -> tuple[LayerShare, ...]:
    """What every layer takes, in mean layers, by its kind's FLOPs and bytes over ep.

    Empty: layers are of one kind.
    """
    costs = costs_of(config)
    if len(costs.kinds) == 1:
        return ()

    def relative(of: Callable[[LayerCosts], float]) -> dict[str, float]:
        mean = costs.mean(of)
        return {name: of(kind) / mean if mean else 1.0 for name, kind in costs.kinds.items()}

    computed = {
        op: relative(lambda kind, op=op: hardware.seconds(getattr(kind, op), kind.in_fp8[op]))
        for op in ("F", "B", "W")
    }
    exchanged = relative(lambda kind: sum(kind.exchanged.values()))
    return tuple(
        LayerShare(*(op[name] for op in computed.values()), exchanged[name]) for name in costs.order
    )


def copies_of(config: Config, hardware: Hardware) -> Copies:
    """Seconds of copies with the host, for the mean of the model's layers.

    F copies out its residuals, B and BW copy all of them back, W only those that it reads.
    """
    if not config.train.offload_layers:
        return NO_COPIES
    costs = costs_of(config)
    both = costs.mean(lambda kind: kind.for_b + kind.for_w) / hardware.host
    own = costs.mean(lambda kind: kind.for_w) / hardware.host
    return Copies(config.train.offload_layers, F=both, B=both, W=own)


def recomputation_of(config: Config, hardware: Hardware) -> Recomputation:
    """Seconds of B that `train.remat_layers` add, with collectives, for the mean layer."""
    if not config.train.remat_layers:
        return NO_RECOMPUTATION
    alike = structs.replace(config, train=structs.replace(config.train, remat_layers=0))
    less, more = (analytic(one, hardware) for one in (alike, recomputing(config)))
    layer, exchange, sharing, tensor = (
        getattr(more, name).B - getattr(less, name).B
        for name in ("layer", "exchange", "sharing", "tensor")
    )
    return Recomputation(config.train.remat_layers, layer + exchange + sharing + tensor)


def read_measured(path: AnyPath) -> OpSeconds:
    """Read measured seconds, as `python -m jaxpipe.bench ops` writes them.

    The form, also for files written by hand, is `{"seconds": {"layer": {"F": s, "B": s, "W": s},
    "head": s, "transfer": s}}`.

    Raises `ConfigError` if the file cannot be read or is not of this form.
    """
    try:
        return msgspec.convert(json.loads(path.read_text())["seconds"], OpSeconds)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read op seconds from {path} ({error}): give what "
            "`python -m jaxpipe.bench ops` writes, or a JSON object like "
            '{"seconds": {"layer": {"F": 1e-3, "B": 1e-3, "W": 1e-3}, "head": 2e-3, "transfer": '
            "1e-4}}."
        ) from error


def measured_seconds(config: Config) -> OpSeconds | None:
    """The measured seconds that `parallel.costs` names; None: none, or none yet.

    Process 0 reads them for all processes, which call this together. Raises `ConfigError` as
    `read_measured` does.
    """
    costs = config.parallel.costs
    if not costs:
        return None

    def read() -> str:
        seconds = read_own(config) if costs == "measure" else read_measured(Path(costs))
        return msgspec.json.encode(seconds).decode()

    return msgspec.json.decode(processes.group().from_first("costs", read), type=OpSeconds | None)


def op_seconds(config: Config, hardware: Hardware | None = None) -> OpSeconds:
    """Return measured seconds if there are any (`parallel.costs`), else those of the hardware.

    Copies with the host are never measured, nor what `train.remat_layers` recomputes, nor what
    layers of one kind take of the mean layer.
    """
    hardware, measured = hardware or Hardware(), measured_seconds(config)
    if measured is None:
        return analytic(config, hardware)
    return structs.replace(
        measured,
        copies=copies_of(config, hardware),
        again=recomputation_of(config, hardware),
        **_rates(config, hardware),
    )


def own_costs(config: Config) -> AnyPath:
    """Path of a run's own measurements, in its folder next to the checkpoints."""
    return open_path(config.run.dir) / "costs.json"


def read_own(config: Config) -> OpSeconds | None:
    """Return what the run has measured; None: nothing yet, or only ops of other sizes.

    Raises `ConfigError` if the file is not what `write_own` wrote.
    """
    path = own_costs(config)
    if not path.exists():
        return None
    seconds = read_measured(path)
    return seconds if json.loads(path.read_text()).get("of") == _sizes(config) else None


def write_own(config: Config, seconds: OpSeconds) -> None:
    """Store measured seconds with the run, for every later start; may raise `OSError`."""
    content = {"of": _sizes(config), "seconds": msgspec.to_builtins(seconds)}
    write_whole(own_costs(config), (json.dumps(content, indent=1) + "\n").encode())


def _sizes(config: Config) -> str:
    return to_toml(essentials(config))
