"""Seconds of every op: from sizes and a device's data sheet, or measured and read from a file."""

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from jaxpipe.config import Config, ConfigError, to_toml
from jaxpipe.planning.cost.collectives import exchange_of, resharding_of, sharing_of, tensor_of
from jaxpipe.planning.cost.compute import OPS, seconds_by_kind
from jaxpipe.planning.cost.costs import ITEMSIZE, costs_of, essentials, recomputing
from jaxpipe.planning.cost.machine import Hardware
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
from jaxpipe.runtime.storage.files import AnyPath, open_path, write_whole

__all__ = [
    "ITEMSIZE", "NO_COPIES", "NO_EXCHANGE", "Copies", "Hardware", "LayerSeconds", "OpSeconds",
    "analytic", "op_seconds", "own_costs", "read_own", "sharing_of", "write_own",
]  # fmt: skip

# Sections and settings of `essentials` on which seconds of ops depend; (): all of a section.
_MEASURED: dict[str, tuple[str, ...]] = {
    "model": (),
    "lora": (),
    "parallel": (
        "cp",
        "cp_method",
        "cp_heads",
        "tp",
        "slices",
        "sequence_parallel",
        "overlap_halves",
    ),
    "train": (),
}


def analytic(config: Config, hardware: Hardware) -> OpSeconds:
    """Compute seconds from kernels and bytes; a layer is the mean of the model's layers.

    The head is the full head, also where ranks share it.
    """
    costs, axes = costs_of(config), hardware.axes(config.parallel)
    kinds = seconds_by_kind(config, hardware)
    layer = {op: {name: getattr(kind, op) for name, kind in kinds.items()} for op in OPS}
    return OpSeconds(
        layer=LayerSeconds(**{op: costs.mean_of(of) for op, of in layer.items()}),
        head=hardware.seconds(costs_of(_with_own_head(config)).head),
        transfer=hardware.neighbour(costs.message, axes.pp),
        copies=copies_of(config, hardware),
        again=recomputation_of(config, hardware),
        exchange=exchange_of(config, hardware),
        sharing=sharing_of(config, hardware).beside(resharding_of(config, hardware)),
        tensor=tensor_of(config, hardware),
        **_rates(config, hardware),
    )


def _with_own_head(config: Config) -> Config:
    parallel = msgspec.structs.replace(config.parallel, vocab_parallel_pp=False)
    return msgspec.structs.replace(config, parallel=parallel)


def _rates(config: Config, hardware: Hardware) -> dict[str, Any]:
    """The fields that measurements lack: shares of layers, and rates of what a step does once."""
    return rates_of_replicas(config, hardware) | {
        "shares": shares_of(config, hardware),
        "host": 1 / hardware.host,
        "memory": hardware.copying(1.0),
    }


def rates_of_replicas(config: Config, hardware: Hardware) -> dict[str, Any]:
    """The fields of `OpSeconds` that alone depend on groups of replicas, unless ops gather."""
    axes = hardware.axes(config.parallel)
    return {
        "network": hardware.ring(1.0, axes.replicas, calls=0),
        "shards": hardware.ring(1.0, axes.shards, calls=0),
        "groups": hardware.ring(1.0, axes.groups, calls=0),
    }


def shares_of(config: Config, hardware: Hardware) -> tuple[LayerShare, ...]:
    """What every layer takes, in mean layers, by its kind's seconds and bytes over ep.

    Empty: layers are of one kind.
    """
    costs = costs_of(config)
    if len(costs.kinds) == 1:
        return ()
    compute = seconds_by_kind(config, hardware)

    def relative(of: dict[str, float]) -> dict[str, float]:
        mean = costs.mean_of(of)
        return {name: each / mean if mean else 1.0 for name, each in of.items()}

    computed = [relative({name: getattr(one, op) for name, one in compute.items()}) for op in "FBW"]
    exchanged = relative({name: sum(kind.exchanged.values()) for name, kind in costs.kinds.items()})
    shares = (*computed, exchanged)
    return tuple(LayerShare(*(share[name] for share in shares)) for name in costs.order)


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
    """Seconds that `train.remat_layers` add to ops, with collectives, for the mean layer."""
    if not config.train.remat_layers:
        return NO_RECOMPUTATION
    alike = structs.replace(config, train=structs.replace(config.train, remat_layers=0))
    less, more = (analytic(one, hardware) for one in (alike, recomputing(config)))
    names = "layer", "exchange", "sharing", "tensor"
    added = {
        op: sum(
            getattr(getattr(more, name), op) - getattr(getattr(less, name), op) for name in names
        )
        for op in ("F", "B", "W", "whole_backward")
    }
    return Recomputation(config.train.remat_layers, *added.values())


def measured_for(config: Config) -> dict[str, Any]:
    """The settings on which seconds of ops depend, by name: a file of measurements carries them."""
    tree = json.loads(msgspec.json.encode(essentials(config)))
    return {
        f"{section}.{key}": value
        for section, keys in _MEASURED.items()
        for key, value in tree[section].items()
        if (not keys or key in keys) and key not in ("n_layers", "preset")
    }


def read_measured(path: AnyPath, config: Config) -> OpSeconds:
    """Read measured seconds for a configuration, as `python -m jaxpipe.bench ops` writes them.

    The form of files written by hand is `{"seconds": {"layer": {"F": s, "B": s, "W": s}, "head": s,
    "transfer": s}}`. `bench ops` adds, as `of`, for what it measured (`measured_for`).

    Raises `ConfigError` if the file cannot be read, is not of this form, or is of other settings.
    """
    try:
        content = json.loads(path.read_text())
        measured, wanted = content.get("of"), measured_for(config)
        if isinstance(measured, dict):
            for name, value in wanted.items():
                if name in measured and measured[name] != value:
                    raise ConfigError(
                        f"{path} was measured with {name}={measured[name]!r}, and this is {name}="
                        f"{value!r}: measure this configuration by `python -m jaxpipe.bench ops`, "
                        f"or leave it to the table of the device."
                    )
        return msgspec.convert(content["seconds"], OpSeconds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
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
        seconds = read_own(config) if costs == "measure" else read_measured(Path(costs), config)
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
    seconds = read_measured(path, config)
    return seconds if json.loads(path.read_text()).get("of") == _sizes(config) else None


def write_own(config: Config, seconds: OpSeconds) -> None:
    """Store measured seconds with the run, for every later start; may raise `OSError`."""
    content = {"of": _sizes(config), "seconds": msgspec.to_builtins(seconds)}
    write_whole(own_costs(config), (json.dumps(content, indent=1) + "\n").encode())


def _sizes(config: Config) -> str:
    return to_toml(essentials(config))
