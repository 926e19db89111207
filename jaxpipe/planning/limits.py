"""Converts `parallel.memory_limit` from bytes to microbatches of the configuration."""

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpipe.config import Config
from jaxpipe.config.units import parse_bytes, readable_bytes
from jaxpipe.core.schedule import MemoryCosts, ScheduleError
from jaxpipe.planning.cost.costs import ITEMSIZE, costs_of, ring_costs
from jaxpipe.planning.cost.memory import logits_of, rank_bytes
from jaxpipe.runtime.environment import usable_share
from jaxpipe.schedules import LIMITS

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout


# Of the memory that jax allocates, what a plan may fill. A program that takes nearly all of it
# hides few collectives (lab/gpu/README.md), and XLA's bytes differ from a plan's by a few percent.
PLANNED_SHARE = 0.92


def planned_bytes(memory: float) -> float:
    """Bytes that a plan may fill of a device with `memory` bytes."""
    return memory * usable_share() * PLANNED_SHARE


@dataclass(frozen=True)
class ActivationLimit:
    """The activation memory that a pipeline rank may use, and how much of it a microbatch takes.

    Attributes:
      setting: `parallel.memory_limit` as it is in the configuration.
      unit: bytes that a stage keeps of a microbatch from F to B, the papers' M_B. Stages share
        their ring buffers, so this is the unit of the largest stage.
      memory: what ops allocate and free, in this unit; between B and W they keep M_W / M_B.
      limit: the limit in this unit, or "1p" or "2p" for a number of microbatches.
    """

    setting: str | float
    unit: float
    memory: MemoryCosts
    limit: str | float

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context in which an error that counts in the unit also states the unit and the limit."""
        try:
            yield
        except ScheduleError as error:
            if self.limit == self.setting:
                raise
            raise ScheduleError(
                f"{str(error).removesuffix('.')}; there 1 is what a stage keeps of a microbatch, "
                f"{readable_bytes(self.unit)}, and parallel.memory_limit={self.setting!r} is "
                f"{self.limit:.3g}."
            ) from error


def activation_limit_of(
    config: Config, layout: "StageLayout", device_memory: float | None
) -> ActivationLimit:
    """Return the activation memory of a rank with these stages under the configuration's limit.

    `device_memory` is in bytes; None: not known.

    Raises `ScheduleError` for an invalid limit, for a limit while all residuals are offloaded, and
    for "auto" if the memory is not known or nothing of it is left.
    """
    unit, memory = _memory_of(config, layout)
    setting = config.parallel.memory_limit
    limit: str | float = setting
    if setting == "auto":
        limit = _free_bytes(config, layout, device_memory) / unit
    elif isinstance(setting, str) and setting not in LIMITS:
        limit = _bytes(setting) / unit
    return ActivationLimit(setting, unit, memory, limit)


def stage_memory(config: Config, layout: "StageLayout") -> MemoryCosts:
    """Return the bytes that ops of one stage and microbatch allocate and free on a device.

    Stages share their ring buffers, so these are the bytes of the largest stage.
    """
    costs, away = costs_of(config), layout.first_ring_slots(config.train.offload_layers)
    kinds = ring_costs(config, layout)
    here = [kind for ring, kind in enumerate(kinds) if ring not in away]
    for_b, for_w, for_r = (
        sum(getattr(kind, name) for kind in here) for name in ("for_b", "for_w", "for_r")
    )
    stash, state = (sum(getattr(kind, name) for kind in kinds) for name in ("stash", "state"))
    # the logits' gradient, and the head's input or stage 0's dx
    if config.parallel.defer_embed_head:
        for_w += logits_of(config) * ITEMSIZE[config.train.compute_dtype] + costs.message
    stored = for_r or for_b + for_w  # by F
    return MemoryCosts(F=stored, B=stash + for_w - stored, W=-for_w - stash, state=state)


def _memory_of(config: Config, layout: "StageLayout") -> tuple[float, MemoryCosts]:
    """Bytes that a stage keeps of a microbatch from F to B, and what ops take in this unit."""
    memory = stage_memory(config, layout)
    unit = memory.F
    if not unit:
        raise ScheduleError(
            f"memory_limit={config.parallel.memory_limit!r} counts what a microbatch keeps on a "
            f"device from F to B, and with train.offload_layers={config.train.offload_layers} all "
            f"of it waits on the host: use fewer layers, or no limit."
        )
    for_w = -memory.W / unit
    return unit, MemoryCosts(F=1.0, B=for_w - 1, W=-for_w, state=memory.state / unit)


def _free_bytes(config: Config, layout: "StageLayout", device_memory: float | None) -> float:
    """Bytes of a device that parameters, gradients, moments, embedding and head leave free."""
    if device_memory is None:
        raise ScheduleError(
            "memory_limit='auto' needs a device whose memory is known, and this one's is not: give "
            "bytes, such as 40GiB."
        )
    state = rank_bytes(config, layout, None).total
    free = planned_bytes(device_memory) - state
    if free <= 0:
        raise ScheduleError(
            f"memory_limit='auto' leaves nothing: parameters, gradients, moments and the head take "
            f"{readable_bytes(state)} of the {readable_bytes(device_memory)} of a device, of which "
            f"{PLANNED_SHARE * usable_share():.0%} are planned with; raise parallel.pp, "
            f"parallel.tp or parallel.zero_stage."
        )
    return free


def _bytes(text: str) -> float:
    try:
        if text[-1] in "Bb":
            return parse_bytes(text)
    except ArgumentTypeError:
        pass
    raise ScheduleError(
        f"memory_limit={text!r}: use '1p', '2p', a number of microbatches, bytes such as 40GiB, or "
        f"'auto'."
    )
