"""What a configuration runs: its schedule, the layers of every stage, its ticks, what ops cost.

Train, plan, profile and the check for GPUs all ask `chosen`, so they mean the same run.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.planning.hardware import (
    Hardware,
    OpSeconds,
    analytic,
    copies_of,
    read_measured,
    read_own,
)
from jaxpipe.planning.limits import room_of
from jaxpipe.planning.memory import layout_of
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.schedule import (
    Costs,
    Lockstep,
    Op,
    Schedule,
    ScheduleError,
    Tables,
    assign_layers,
    build,
    check_memory,
    family_of,
    lower,
    validate,
)
from jaxpipe.schedule.scan import paced, scan_time

QUICK = 100_000  # effort of a search that takes less than a second
_AS_FAST = 1.01  # a plan cannot tell times apart that differ by less


@dataclass(frozen=True)
class Choice:
    """A schedule, the layers of each of its stages, and how the scan lays it out in ticks."""

    schedule: Schedule
    layers: tuple[int, ...]
    lockstep: Lockstep

    @property
    def tables(self) -> Tables:
        """What the scan reads; raises `ScheduleError` where it cannot run the schedule."""
        return lower(self.schedule, self.lockstep)

    def settled(self, config: Config) -> Config:
        """The configuration that it was chosen for, with the ends as they were decided."""
        return _settled(config, shared=self.lockstep.vocab_parallel)

    def costs(self, config: Config, seconds: OpSeconds) -> Costs:
        """Seconds of its stages."""
        return seconds.costs(
            self.layers,
            shared_by=self.settled(config).parallel.ends_shared_by,
            split=any(action.op is Op.B for _, action in self.schedule.actions()),
            pairs=self.lockstep.pairs,
        )


def chosen(
    config: Config,
    *,
    platform: str | None = None,
    memory: float | None = None,
    seconds: OpSeconds | None = None,
    effort: int | None = None,
) -> Choice:
    """What a run of a configuration executes, searched once where its builder searches.

    A search takes the costs of the configuration's own stages, measured (`parallel.costs`) or those
    of an H100, and makes least what `parallel.objective` says. Under `parallel.memory_limit` a
    microbatch takes the bytes that it keeps for B and for W in this configuration; without one,
    searches keep to the number of microbatches that their families say. Every schedule is proved
    (`schedule.validate`).

    Args:
      config: of the run.
      platform: of its devices; None: CPUs if the configuration has virtual ones, else GPUs.
      memory: bytes of a device, for `parallel.memory_limit = "auto"`; None: not known.
      seconds: costs of ops for a search, if not those above.
      effort: of a search, as in `build`; `QUICK` is for comparing many, and paces none
        (`schedule.scan.paced`).

    Raises `ScheduleError` where there is no such schedule, none within `parallel.memory_limit`, or
    a stage with fewer layers than are to be offloaded.
    """
    config = decided(config, platform)
    parallel = config.parallel
    lockstep = lockstep_of(config, platform)
    options: dict[str, Any] = {
        "virtual_stages": parallel.virtual_stages or None,
        "breadth": parallel.breadth or None,
        "slices": parallel.slices,
    }
    if parallel.schedule_file:
        options["path"] = parallel.schedule_file
    if family_of(parallel.schedule).searched:
        options |= {"objective": parallel.objective, "effort": effort}
        if parallel.objective == "scan":
            options["lockstep"] = replace(lockstep, in_flight=None)
        schedule = _searched(config, options, seconds or op_seconds(config), memory)
    else:
        schedule = _built(config, options)
    layers = layers_of(config, schedule.stages)
    if config.train.offload_layers > min(layers):
        raise ScheduleError(
            f"train.offload_layers={config.train.offload_layers} exceeds the layers of the "
            f"shortest stage, {min(layers)}: every rank copies as many; offload at most so many."
        )
    if parallel.memory_limit:
        room = room_of(config, layout_of(config, schedule.placement, layers), memory)
        with room.explaining():
            check_memory(schedule, room.memory, room.limit, lockstep)
    choice = Choice(schedule, layers, lockstep)
    if effort == QUICK:
        return choice
    costs = choice.costs(config, seconds or op_seconds(config))
    turns = not lockstep.meets and parallel.transfer_ticks != 2
    return replace(choice, lockstep=paced(schedule, costs, lockstep, turns=turns))


def layers_of(config: Config, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages; raises `ScheduleError` where they cannot be filled."""
    parallel = config.parallel
    return assign_layers(
        config.model.n_layers, stages, parallel.layer_split,
        weights=(parallel.input_weight, parallel.output_weight),
        pinned=(parallel.first_stage_layers, parallel.last_stage_layers),
    )  # fmt: skip


def decided(config: Config, platform: str | None = None) -> Config:
    """The configuration with `parallel.vocab_parallel_pp` decided where it is "auto".

    It becomes true where the scan of its schedule then takes no longer (a hundredth counts as
    nothing), by the seconds of an H100 or of a file: not by what a run has measured, since each of
    its starts must decide alike. It becomes false where that cannot be, and on CPU, where ranks
    share cores; `platform` as in `chosen`.
    """
    if config.parallel.vocab_parallel_pp != "auto":
        return config
    return _settled(config, shared=not _on_cpu(config, platform) and _gains_by_sharing(config))


@lru_cache(maxsize=64)  # several ask for the same run
def _gains_by_sharing(config: Config) -> bool:
    """Whether embedding and head that all ranks share are possible, and take no longer.

    Both are timed in one order of actions, searched for ends of which each has its rank.
    """
    if len(ends_of(config)) == 1:
        return False
    if config.parallel.costs == "measure":
        config = structs.replace(config, parallel=structs.replace(config.parallel, costs=""))
    config = _settled(config, shared=False)
    seconds, memory = op_seconds(config), DEVICES[Hardware().device].memory

    def scanned(choice: Choice) -> float:
        return scan_time(choice.schedule, choice.costs(config, seconds), choice.lockstep)

    try:
        own = chosen(config, platform="gpu", memory=memory, seconds=seconds, effort=QUICK)
        together = replace(own, lockstep=replace(own.lockstep, vocab_parallel=True))
        return scanned(together) <= scanned(own) * _AS_FAST
    except ScheduleError:
        return False


def ends_of(config: Config) -> list[Config]:
    """The configuration with the ends among which `decided` chooses: each rank's own, or shared."""
    parallel = config.parallel
    if parallel.vocab_parallel_pp != "auto":
        return [config]
    alone = parallel.pp == 1 or parallel.defer_ends or config.train.fused_steps > 1
    return [_settled(config, shared=shared) for shared in ((False,) if alone else (False, True))]


def _settled(config: Config, *, shared: bool) -> Config:
    parallel = structs.replace(config.parallel, vocab_parallel_pp=shared)
    return structs.replace(config, parallel=parallel)


def _on_cpu(config: Config, platform: str | None) -> bool:
    return (platform or ("cpu" if config.runtime.cpu_devices else "gpu")) == "cpu"


def lockstep_of(config: Config, platform: str | None = None) -> Lockstep:
    """How the scan lays a configuration's schedule out in ticks; `platform` as in `chosen`.

    On CPU messages take no tick of their own, since collectives wait there, whatever stands beside
    them, and all ranks meet in them; for the same reason nothing is gained by halves of a cell that
    may overlap. A pair reads before its branch, in every tick: so there is none where residuals
    wait on the host.

    Raises `ScheduleError` for ends that are both shared and deferred.
    """
    parallel, on_cpu = config.parallel, _on_cpu(config, platform)
    return Lockstep(
        transfer_ticks=parallel.transfer_ticks or (1 if on_cpu else 2),
        in_flight=parallel.in_flight or None,
        vocab_parallel=bool(parallel.ends_shared_by),
        defer_ends=parallel.defer_ends,
        pairs=not on_cpu and not config.train.offload_layers,
        meets=on_cpu,
    )


def op_seconds(config: Config, hardware: Hardware | None = None) -> OpSeconds:
    """Measured seconds where the configuration names a file of them, else from the data sheet.

    With `parallel.costs = "measure"` they are those that the run has measured, if it has by now.
    Copies with the host are never measured.
    """
    costs, hardware = config.parallel.costs, hardware or Hardware()
    if costs == "measure":
        measured = read_own(config)
    else:
        measured = read_measured(Path(costs)) if costs else None
    if measured is None:
        return analytic(config, hardware)
    return structs.replace(measured, copies=copies_of(config, hardware))


def _searched(
    config: Config, options: dict[str, Any], seconds: OpSeconds, memory: float | None
) -> Schedule:
    """A schedule for the costs of the configuration's stages, within what they may keep."""
    parallel = config.parallel
    placement = family_of(parallel.schedule).placed(parallel.pp)
    layers = layers_of(config, placement.stages)
    options = options | {"costs": seconds.costs(layers, shared_by=parallel.ends_shared_by)}
    if not parallel.memory_limit:
        return _built(config, options)
    room = room_of(config, layout_of(config, placement, layers), memory)
    with room.explaining():
        return _built(config, options | {"memory": room.memory, "memory_limit": room.limit})


def _built(config: Config, options: dict[str, Any]) -> Schedule:
    name = family_of(config.parallel.schedule).name
    sizes = config.parallel.pp, config.train.grad_accum_steps
    return _proved(name, *sizes, tuple(options.items()))


@cache
def _proved(
    name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]
) -> Schedule:
    schedule = build(name, pp=pp, microbatches=microbatches, **dict(options))
    validate(schedule)
    return schedule
