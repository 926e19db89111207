"""Seconds of every op: from sizes and a device's data sheet, or measured and read from a file."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxpipe.config import Config, ConfigError, to_toml
from jaxpipe.planning.costs import costs_of, essentials
from jaxpipe.runtime import processes
from jaxpipe.runtime.devices import DEVICES, Device
from jaxpipe.schedule import Costs

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


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


class Copies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of copies with the host in F, B and W of one of a stage's first `layers` layers.

    BW copies what B does.
    """

    layers: int
    F: float
    B: float
    W: float

    def beside(self, copy: float, compute: float, count: int) -> float:
        """Seconds of `count` layers with their copies, which may overlap compute of other layers.

        The first copy starts after a layer's compute, or the last ends before one; the time is the
        same.

        >>> copies = Copies(layers=2, F=3.0, B=3.0, W=0.0)
        >>> [copies.beside(copies.F, compute, 4) for compute in (4.0, 1.0)]
        [16.0, 7.0]
        """
        copied, plain = min(self.layers, count), count * compute
        if not copied:
            return plain
        return max(plain, compute + copy + (copied - 1) * max(compute, copy))


NO_COPIES = Copies(layers=0, F=0.0, B=0.0, W=0.0)


class LayerSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of F, B and W of one layer, and of BW if it was measured; else 0."""

    F: float
    B: float
    W: float
    BW: float = 0.0

    @property
    def whole_backward(self) -> float:
        """Seconds of BW."""
        return self.BW or self.B + self.W

    def beside(self, more: "LayerSeconds") -> "LayerSeconds":
        """Add the seconds of `more`."""
        both = self.BW and self.BW + more.whole_backward
        return LayerSeconds(self.F + more.F, self.B + more.B, self.W + more.W, both)


NO_EXCHANGE = LayerSeconds(F=0.0, B=0.0, W=0.0)


class OpSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one microbatch or slice on one device.

    Attributes:
      layer: one layer, compute alone unless measured.
      transfer: a message to each of both neighbours at once, as every tick sends them.
      copies: of residuals that are offloaded to the host; computed, never measured.
      exchange: all-to-alls of a layer over ep; 0 if `layer` is measured and so contains them.
      sharing: waits of a layer for replicas that share its sequences; 0 if `layer` is measured.
    """

    layer: LayerSeconds
    head: float  # loss, its gradient and the gradients of its weights
    transfer: float
    embed: float = 0.0
    embed_gradient: float = 0.0  # the embedding's share of B
    copies: Copies = NO_COPIES
    exchange: LayerSeconds = NO_EXCHANGE
    sharing: LayerSeconds = NO_EXCHANGE

    def sending(self, size: int, message: int) -> float:
        """Seconds to send `size` bytes to a neighbour, if `message` bytes take `transfer`."""
        return self.transfer * size / message

    def costs(
        self, layers: tuple[int, ...], *, shared_by: int = 0, split: bool = True, pairs: bool = True
    ) -> Costs:
        """Return the costs of stages; the first has the embedding, and the last the head in its F.

        Args:
          layers: number of layers per stage.
          shared_by: ranks that share embedding and head (vocabulary-parallel); 0: none. All stages'
            F then carry equal shares of the compute, and of four all-reduces per microbatch, each
            of which sends 2 (P - 1) / P messages in a ring of P ranks.
          split: whether B and W are separate; if not, each is half of BW.
          pairs: whether exchanges of one half of a cell hide behind the other half.
        """
        rest = (0.0,) * (len(layers) - 1)
        entered, left, returned = (
            (self.embed, *rest),
            (*rest, self.head),
            (self.embed_gradient, *rest),
        )
        if shared_by:
            sums = 4 * 2 * (shared_by - 1) * self.transfer
            ends = self.embed + self.head + self.embed_gradient + sums
            entered = (ends / len(layers),) * len(layers)
            left = returned = (0.0,) * len(layers)
        layer, copies, exchange = self.layer.beside(self.sharing), self.copies, self.exchange
        b, w = (layer.B, copies.B, exchange.B), (layer.W, copies.W, exchange.W)
        if not split:
            b = w = layer.whole_backward / 2, copies.B / 2, (exchange.B + exchange.W) / 2

        def layers_take(n: int, compute: float, copy: float, exchanged: float) -> float:
            return copies.beside(copy, compute + exchanged, n)

        f = layer.F, copies.F, exchange.F
        exchanges = (tuple(n * op[-1] for n in layers) for op in (f, b, w))
        return Costs(
            F=tuple(layers_take(n, *f) + e + h for n, e, h in zip(layers, entered, left)),
            B=tuple(layers_take(n, *b) + e for n, e in zip(layers, returned)),
            W=tuple(layers_take(n, *w) for n in layers),
            transfer=self.transfer,
            exchange=Costs(*exchanges) if pairs and exchange != NO_EXCHANGE else None,
        )


def analytic(config: Config, hardware: Hardware) -> OpSeconds:
    """Compute seconds from FLOPs and bytes; a layer is the mean of the model's layers.

    The head is the full head, also where ranks share it.
    """
    costs = costs_of(config)
    layers = [costs.kinds[kind] for kind in costs.order]

    def mean(op: str) -> float:
        seconds = (hardware.seconds(getattr(kind, op), kind.in_fp8[op]) for kind in layers)
        return sum(seconds) / len(layers)

    return OpSeconds(
        layer=LayerSeconds(mean("F"), mean("B"), mean("W")),
        head=costs.head * max(1, config.parallel.ends_shared_by) / hardware.flops,
        transfer=costs.message / hardware.link,
        copies=copies_of(config, hardware),
        exchange=LayerSeconds(
            *(sum(kind.exchanged[op] for kind in layers) / len(layers) / hardware.network
              for op in ("F", "B", "W"))
        ),
        sharing=sharing_of(config, hardware),
    )  # fmt: skip


def sharing_of(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds for which the mean layer waits for the replicas that share its sequences.

    A ring sends keys and values during attention to those already received, which is the causal
    half of attention without the last ring position's share. All other traffic is waited for.
    """
    costs, parallel = costs_of(config), config.parallel
    if parallel.cp == 1:
        return NO_EXCHANGE
    layers = [costs.kinds[kind] for kind in costs.order]
    behind = dict.fromkeys(("F", "B", "W"), 0.0)
    if parallel.rings:
        model, train = config.model, config.train
        whole = model.flops_per_token(train.seq_len) - model.flops_per_token(0)
        parts = parallel.rows_per_sequence * parallel.tp
        tokens = train.microbatch_size * train.seq_len / parts
        others = (parallel.ring - 1) / parallel.ring
        # Of 12 FLOPs per query and key F computes 4, and causal attention reads half of the keys.
        forwards = whole / len(layers) * tokens / 6 / hardware.flops * others
        again = 1 if train.remat == "full" else 0
        behind |= {"F": forwards, "B": (2.5 + again) * forwards}

    def waits(op: str) -> float:
        sent, turned = (
            sum(each[op] for each in sizes) / len(layers) / hardware.network
            for sizes in zip(*((kind.shared, kind.turned) for kind in layers))
        )
        return sent - turned + max(0.0, turned - behind[op])

    return LayerSeconds(*map(waits, ("F", "B", "W")))


def copies_of(config: Config, hardware: Hardware) -> Copies:
    """Seconds of copies with the host, for the mean of the model's layers.

    F copies out its residuals, B and BW copy all of them back, W those that it reads itself.
    """
    if not config.train.offload_layers:
        return NO_COPIES
    costs = costs_of(config)
    layers = [costs.kinds[kind] for kind in costs.order]
    for_b, for_w = (sum(getattr(kind, name) for kind in layers) for name in ("for_b", "for_w"))
    both, own = ((size / len(layers)) / hardware.host for size in (for_b + for_w, for_w))
    return Copies(config.train.offload_layers, F=both, B=both, W=own)


def read_measured(path: Path) -> OpSeconds:
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

    return msgspec.json.decode(processes.from_first("costs", read), type=OpSeconds | None)


def op_seconds(config: Config, hardware: Hardware | None = None) -> OpSeconds:
    """Return measured seconds if there are any (`parallel.costs`), else those of the hardware.

    Copies with the host are never measured.
    """
    hardware, measured = hardware or Hardware(), measured_seconds(config)
    if measured is None:
        return analytic(config, hardware)
    return msgspec.structs.replace(measured, copies=copies_of(config, hardware))


def own_costs(config: Config) -> Path:
    """Path of a run's own measurements, in its folder next to the checkpoints."""
    return Path(config.run.dir) / "costs.json"


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
    path = own_costs(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"of": _sizes(config), "seconds": msgspec.to_builtins(seconds)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _sizes(config: Config) -> str:
    return to_toml(essentials(config))
