"""What a configuration runs: schedule, layers of each stage, lockstep settings, costs of ops.

Train, plan, profile and the check for GPUs all call `chosen`, so they mean the same run.
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
    find_family,
    lower,
    validate,
)
from jaxpipe.schedule.scan import optimize_pace, scan_time

QUICK = 100_000  # effort of a search that takes less than a second
_AS_FAST = 1.01  # times that differ by less count as equal: a plan is not more exact


@dataclass(frozen=True)
class Choice:
    """A schedule, the layers of each of its stages, and how the scan lays it out in ticks."""

    schedule: Schedule
    layers: tuple[int, ...]
    lockstep: Lockstep

    @property
    def tables(self) -> Tables:
        """Tables that the scan reads; raises `ScheduleError` if it cannot run the schedule."""
        return lower(self.schedule, self.lockstep)

    def settled(self, config: Config) -> Config:
        """Return the configuration with `parallel.vocab_parallel_pp` as it was chosen."""
        return _settled(config, shared=self.lockstep.vocab_parallel)

    def costs(self, config: Config, seconds: OpSeconds) -> Costs:
        """Seconds of the schedule's stages."""
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
    """Return what a run of a configuration executes; a searched schedule is searched only once.

    A search uses the costs of the configuration's own stages, measured (`parallel.costs`) or those
    of an H100, and minimises `parallel.objective`. Under `parallel.memory_limit` a microbatch takes
    the bytes that it keeps for B and for W in this configuration; without a limit, searches keep to
    the number of microbatches that their families set. Every schedule is validated
    (`schedule.validate`).

    Args:
      config: of the run.
      platform: of its devices; None: CPUs if the configuration has virtual ones, else GPUs.
      memory: bytes of a device, for `parallel.memory_limit = "auto"`; None: not known.
      seconds: costs of ops, in place of those above.
      effort: of a search, as in `build`; `QUICK` is for comparing many candidates, and leaves
        pacing out (`schedule.scan.optimize_pace`).

    Raises `ScheduleError` if there is no such schedule, none within `parallel.memory_limit`, or a
    stage has fewer layers than are to be offloaded.
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
    if find_family(parallel.schedule).is_searched:
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
    turns = not lockstep.synchronizes_all and parallel.transfer_ticks != 2
    return replace(choice, lockstep=optimize_pace(schedule, costs, lockstep, turns=turns))


def layers_of(config: Config, stages: int) -> tuple[int, ...]:
    """Number of layers per stage; raises `ScheduleError` if the layers do not fit the stages."""
    parallel = config.parallel
    return assign_layers(
        config.model.n_layers, stages, parallel.layer_split,
        weights=(parallel.input_weight, parallel.output_weight),
        pinned=(parallel.first_stage_layers, parallel.last_stage_layers),
    )  # fmt: skip


def decided(config: Config, platform: str | None = None) -> Config:
    """Return the configuration with `parallel.vocab_parallel_pp` = "auto" resolved.

    It becomes true if the scan of its schedule then takes at most 1 % longer, by the seconds of an
    H100 or of a file; a run's own measurements are not used, since each of its starts must decide
    alike. It becomes false if vocabulary parallelism is not possible, and on CPU, where ranks share
    cores; `platform` as in `chosen`.
    """
    if config.parallel.vocab_parallel_pp != "auto":
        return config
    return _settled(config, shared=not _on_cpu(config, platform) and _gains_by_sharing(config))


@lru_cache(maxsize=64)  # several callers ask for the same run
def _gains_by_sharing(config: Config) -> bool:
    """Whether vocabulary-parallel embedding and head are possible, and take no longer.

    Both variants are timed with one order of actions, searched for embedding and head on the end
    stages.
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
    """The configurations that `decided` chooses from: embed_head on the end stages, or over pp."""
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

    On CPU a collective blocks whatever compute stands next to it, and all ranks meet in it. So
    messages have no tick of their own there, and halves of a cell in one branch would gain nothing.
    Paired halves read residuals before their branch, in every tick, so there are none if residuals
    wait on the host.

    Raises `ScheduleError` for embedding and head that are both vocabulary-parallel and deferred.
    """
    parallel, on_cpu = config.parallel, _on_cpu(config, platform)
    return Lockstep(
        transfer_ticks=parallel.transfer_ticks or (1 if on_cpu else 2),
        in_flight=parallel.in_flight or None,
        vocab_parallel=bool(parallel.ends_shared_by),
        defer_ends=parallel.defer_ends,
        pairs=not on_cpu and not config.train.offload_layers,
        synchronizes_all=on_cpu,
    )


def op_seconds(config: Config, hardware: Hardware | None = None) -> OpSeconds:
    """Return measured seconds if the configuration names a file, else those of the data sheet.

    With `parallel.costs = "measure"` they are the run's own measurements, if there are any yet.
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
    """Search a schedule for the costs of the configuration's stages, within its memory limit."""
    parallel = config.parallel
    placement = find_family(parallel.schedule).place_stages(parallel.pp)
    layers = layers_of(config, placement.stages)
    options = options | {"costs": seconds.costs(layers, shared_by=parallel.ends_shared_by)}
    if not parallel.memory_limit:
        return _built(config, options)
    room = room_of(config, layout_of(config, placement, layers), memory)
    with room.explaining():
        return _built(config, options | {"memory": room.memory, "memory_limit": room.limit})


def _built(config: Config, options: dict[str, Any]) -> Schedule:
    name = find_family(config.parallel.schedule).name
    sizes = config.parallel.pp, config.train.grad_accum_steps
    return _proved(name, *sizes, tuple(options.items()))


@cache
def _proved(
    name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]
) -> Schedule:
    schedule = build(name, pp=pp, microbatches=microbatches, **dict(options))
    validate(schedule)
    return schedule
