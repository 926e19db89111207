"""A machine: devices of one kind in hosts, the links between them, and where mesh axes lie."""

import tomllib
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jaxpipe.config import ConfigError, ParallelConfig
from jaxpipe.config.units import parse_bytes
from jaxpipe.planning.cost.card import Card, card_of
from jaxpipe.planning.cost.card_table import read_table
from jaxpipe.planning.cost.kernels import Operations
from jaxpipe.runtime.devices import DEVICES, Device

_REACHED = 0.85  # share of a link's bytes per second that NCCL's large messages reach


class Group(NamedTuple):
    """Devices that run a collective together, and how many of them are in the same host."""

    members: int
    in_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts of the group."""
        return -(-self.members // self.in_host)


class Axes(NamedTuple):
    """The groups of devices of a mesh that communicate.

    Attributes:
      tp: devices that share a layer.
      cp: replicas that share a sequence.
      ep: devices that share the experts of a layer.
      shards: replicas over which ZeRO shards parameters.
      groups: replicas with the same shards (`parallel.dp_replicate`).
      replicas: all replicas of a pipeline rank.
      pp: pipeline ranks.
    """

    tp: Group
    cp: Group
    ep: Group
    shards: Group
    groups: Group
    replicas: Group
    pp: Group


@dataclass(frozen=True)
class Hardware:
    """A machine, by which ops and collectives are timed.

    Attributes:
      device: a name in `runtime.devices.DEVICES`, or that of the table.
      per_host: devices of a host.
      link: bytes per second to another device of the host, one way; 0: the data sheet's.
      network: bytes per second of a device's network cards, one way.
      host: bytes per second between a device and its host's memory.
      link_latency, network_latency: seconds of a message to the next device, and host, of a ring.
      speed: of kernels, relative to the tables of the device (power limits, clocks, software).
      table: file of the device's measured rates (`bench ops --table`); "": those of an H100.
    """

    device: str = "H100"
    _: KW_ONLY
    per_host: int = 8
    link: float = 0.0
    network: float = 50e9
    host: float = 55e9
    link_latency: float = 2e-6
    network_latency: float = 8e-6
    speed: float = 1.0
    table: str = ""

    def seconds(self, kernels: Operations) -> float:
        """Seconds of kernels on a device, one after the other."""
        return self._card.seconds(kernels) / self.speed

    @property
    def attention_flops(self) -> float:
        """FLOP/s of attention over long sequences, about half of the peak."""
        return self.sheet.flops / 2 * self.speed

    def copying(self, size: float) -> float:
        """Seconds in which a device reads and writes `size` bytes of its memory in all."""
        return self._card.copying(size) / self.speed

    def ring(self, sent: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of collectives in which every device sends `sent` bytes around rings.

        All of the group's devices in a host have a network card, and rings leave a host through
        each of them.
        """
        if group.members == 1:
            return 0.0
        rate = self._within
        if group.hosts > 1:
            rate = min(rate, self.network * group.in_host)
        latency = (group.in_host - 1) * self.link_latency
        latency += (group.hosts - 1) * self.network_latency
        return sent / (rate * _REACHED) + calls * latency

    def all_to_all(self, sent: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of all-to-alls in which every device sends `sent` bytes to the others."""
        if group.members == 1:
            return 0.0
        leaving = (group.members - group.in_host) / (group.members - 1)
        seconds = max(sent * leaving / self.network, sent * (1 - leaving) / self._within)
        latency = self.network_latency if leaving else self.link_latency
        return seconds / _REACHED + calls * latency

    def neighbour(self, sent: float, group: Group) -> float:
        """Seconds in which every device sends to the next of a group that is in a ring."""
        return sent / ((self.network if group.hosts > 1 else self._within) * _REACHED)

    def axes(self, parallel: ParallelConfig) -> Axes:
        """Where the axes of a mesh lie: tp fastest, then replicas, then pipeline ranks."""
        tp, pp = parallel.tp, parallel.pp
        dp = max(parallel.dp, 1)
        between_replicas = tp * (pp if parallel.pipeline_first else 1)
        between_ranks = tp * (1 if parallel.pipeline_first else dp)

        def group(members: int, stride: int) -> Group:
            return Group(members, max(1, min(members, self.per_host // stride)))

        sharers = group(parallel.ep_replicas, between_replicas)
        if parallel.ep_over_tp:
            sharers = Group(parallel.ep, min(sharers.in_host * tp, self.per_host))
        return Axes(
            tp=group(tp, 1),
            cp=group(parallel.cp, between_replicas),
            ep=sharers,
            shards=group(dp // parallel.dp_replicate, between_replicas),
            groups=group(parallel.dp_replicate, between_replicas * (dp // parallel.dp_replicate)),
            replicas=group(dp, between_replicas),
            pp=group(pp, between_ranks),
        )

    @property
    def _within(self) -> float:
        return self.link or self.sheet.link

    @property
    def _card(self) -> Card:
        if not self.table and self.device not in DEVICES:
            raise ConfigError(
                f"unknown device {self.device!r}: use one of {', '.join(DEVICES)}, or give the "
                f"`table` that `python -m jaxpipe.bench ops --table` writes on it."
            )
        return card_of(self.device, self.table)

    @property
    def sheet(self) -> Device:
        """The device's data sheet; raises `ConfigError` if the device is not known."""
        return self._card.sheet

    @property
    def usual(self) -> "Hardware":
        """The machine that a run takes for its own: it knows a device, but no links or tables."""
        return machine_of(self.device) if self.device in DEVICES else self


def machine(name: str) -> Hardware:
    """The machine of a name in `machines.toml`, or of a TOML file of the same form.

    A JSON file is the table of a card, in its usual machine. Raises `ConfigError` if there is no
    such machine, or the file is not of this form.
    """
    known = tomllib.loads(files(__package__).joinpath("machines.toml").read_text("utf-8"))
    if name in known:
        return _read(known[name], f"--machine {name}")
    if name.endswith(".json"):
        return replace(machine_of(read_table(name).device), table=name)
    if not name.endswith(".toml"):
        raise ConfigError(
            f"unknown machine {name!r}: use one of {', '.join(known)}, the .json file of "
            f"`python -m jaxpipe.bench ops --table`, or a .toml file with some of "
            f"{', '.join(field.name for field in fields(Hardware))}."
        )
    try:
        content = tomllib.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--machine {name} cannot be read ({error}).") from error
    return _read(content, f"--machine {name}", Path(name).parent)


def machine_of(device: str) -> Hardware:
    """The named machine of a device; hosts of 8 with a 400 Gb/s card each if there is none."""
    name = f"dgx-{device.lower()}"
    known = tomllib.loads(files(__package__).joinpath("machines.toml").read_text("utf-8"))
    return machine(name) if name in known else Hardware(device=device)


def _read(content: Mapping[str, Any], where: str, folder: Path = Path()) -> Hardware:
    names = [field.name for field in fields(Hardware)]
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}: use some of {', '.join(names)}.")
        if key in ("device", "table"):
            values[key] = str(value)
            continue
        try:
            values[key] = parse_bytes(value) if isinstance(value, str) else value
        except ArgumentTypeError as error:
            raise ConfigError(f"{where}: {key}: {error}.") from error
        if not isinstance(values[key], int | float) or values[key] <= 0:
            raise ConfigError(f"{where}: {key}={value!r} must be a number above 0.")
    if "table" in values:
        values["table"] = str(folder / values["table"])
        measured = read_table(values["table"]).device
        if values.setdefault("device", measured) != measured:
            raise ConfigError(
                f"{where}: device={values['device']!r} with the table of {measured!r}: leave out "
                f"one of them."
            )
    found = Hardware(**values)
    _ = found.sheet
    return found
