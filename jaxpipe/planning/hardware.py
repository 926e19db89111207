"""Seconds of every op: from sizes and a device's data sheet, or measured and read from a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.analysis import OpFlops, head_flops, hidden_bytes, layer_flops
from jaxpipe.config import Config, ConfigError
from jaxpipe.presets import DEVICES
from jaxpipe.schedule import Costs

ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Hardware:
    """A device and the link to its neighbours on the ring.

    `efficiency` is the share of the peak that an op reaches; the bubble comes on top of it.
    """

    device: str = "H100"
    efficiency: float = 0.5
    link: float = 50e9  # bytes a second to one neighbour, one way

    @property
    def flops(self) -> float:
        """Dense bfloat16 FLOP/s that ops reach."""
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}: use one of {', '.join(DEVICES)}.")
        return DEVICES[self.device].flops * self.efficiency


class OpSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one microbatch on one device: of one layer, of the head, of one message."""

    layer: "LayerSeconds"
    head: float  # loss, its gradient and the gradients of its weights
    transfer: float

    def costs(self, layers: tuple[int, ...], *, vocab_parallel: bool = False) -> Costs:
        """Costs of stages with so many layers; the head runs with the last stage's F.

        With `vocab_parallel` all ranks share it equally, which here the F's of all stages pay for.
        """
        ends = (*(0.0 for _ in layers[1:]), self.head)
        if vocab_parallel:
            ends = (self.head / len(layers),) * len(layers)
        return Costs(
            F=tuple(n * self.layer.F + end for n, end in zip(layers, ends)),
            B=tuple(n * self.layer.B for n in layers),
            W=tuple(n * self.layer.W for n in layers),
            transfer=self.transfer,
        )


class LayerSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of F, B and W of one layer."""

    F: float
    B: float
    W: float


def analytic(config: Config, hardware: Hardware) -> OpSeconds:
    """Seconds from FLOPs and bytes."""
    train, tp = config.train, config.parallel.tp
    sizes: dict[str, Any] = {"batch": train.microbatch_size, "seq_len": train.seq_len, "tp": tp}
    layer = layer_flops(config.model, remat=train.remat, **sizes)
    head = head_flops(config.model, **sizes)
    message = hidden_bytes(config.model, itemsize=ITEMSIZE[train.compute_dtype], **sizes)
    return OpSeconds(
        layer=LayerSeconds(*(work / hardware.flops for work in (layer.F, layer.B, layer.W))),
        head=_total(head) / hardware.flops,
        transfer=message / hardware.link,
    )


def read_measured(path: Path) -> OpSeconds:
    """Measured seconds from `{"layer": {"F": s, "B": s, "W": s}, "head": s, "transfer": s}`.

    Raises `ConfigError` where the file cannot be read or is not of this form.
    """
    try:
        return msgspec.convert(json.loads(path.read_text()), OpSeconds)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read op seconds from {path} ({error}): give a JSON object like "
            '{"layer": {"F": 1e-3, "B": 1e-3, "W": 1e-3}, "head": 2e-3, "transfer": 1e-4}.'
        ) from error


def _total(work: OpFlops) -> float:
    return work.F + work.B + work.W
