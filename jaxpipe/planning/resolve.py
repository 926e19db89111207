"""Resolves a configuration into the plan of a run: concrete settings, schedule, stages, costs.

Train, plan, profile, bench and the check for GPUs all resolve here, so they mean the same run.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.schedule import (
    Costs,
    Lockstep,
    Placement,
    ScanBuffers,
    Schedule,
    ScheduleError,
    Tables,
    assign_layers,
    lower,
    recompute_ahead,
    scan_buffers,
    validate,
)
from jaxpipe.core.schedule.scan import optimize_pace, scan_time
from jaxpipe.planning.balance import balanced_splits
from jaxpipe.planning.cost.hardware import OpSeconds, op_seconds
from jaxpipe.planning.cost.memory import RankBytes, layout_of, rank_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.limits import activation_limit_of
from jaxpipe.planning.loops import unroll_layers
from jaxpipe.planning.rules.devices import check_devices
from jaxpipe.planning.rules.sizes import resolve_sizes
from jaxpipe.schedules import build, check_memory, find_family

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout

QUICK = 100_000  # effort of a search that takes less than a second
_AS_FAST = 1.01  # times that differ by less count as equal: a plan is not more exact


@dataclass(frozen=True)
class RunPlan:
    """What a run executes, and on which devices.

    Attributes:
      config: the configuration with concrete sizes and `parallel.vocab_parallel_pp`.
      devices: of the run.
      schedule: the order of actions on every pipeline rank.
      layers: number of layers of each stage.
      lockstep: how the scan lays the schedule out in ticks.
      seconds: seconds of ops, measured (`parallel.costs`) or by the data sheet of the devices.
    """

    config: Config
    devices: Devices
    schedule: Schedule
    layers: tuple[int, ...]
    lockstep: Lockstep
    seconds: OpSeconds

    @cached_property
    def tables(self) -> Tables:
        """Tables that the scan reads; raises `ScheduleError` if it cannot run the schedule."""
        return lower(self.schedule, self.lockstep)

    @cached_property
    def buffers(self) -> ScanBuffers:
        """What the scan stores and sends: `tables` without what every rank does in a tick."""
        return scan_buffers(self.schedule, self.lockstep)

    @cached_property
    def layout(self) -> "StageLayout":
        """The layers of each stage by kind, and the pipeline rank of each stage."""
        return layout_of(self.config, self.schedule.placement, self.layers)

    @cached_property
    def unroll_layers(self) -> int | None:
        """`StageLayout.unroll` of the run; raises `ConfigError` if it excludes another setting."""
        return unroll_layers(self)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of the schedule's stages, from `seconds`."""
        return self.costs_of_stages(recomputes=self.schedule.recomputes)

    def costs_of_stages(self, *, recomputes: bool) -> Costs:
        """Seconds of the schedule's stages; `recomputes`: as in `OpSeconds.costs`."""
        return self.seconds.costs(
            self.layers,
            shared_by=self.config.parallel.vocab_shared_by,
            split=self.schedule.splits_gradients,
            pairs=self.lockstep.pairs,
            recomputes=recomputes,
        )

    @cached_property
    def memory(self) -> RankBytes:
        """Bytes of a device; `devices.memory` is what it has."""
        return rank_bytes(self.config, self.layout, self.buffers)


def resolve(config: Config, devices: Devices | None = None, *, trains: bool = True) -> RunPlan:
    """Return what a run of a configuration executes on these devices.

    Args:
      config: of the run, with its static rules checked (`checks.check_settings`).
      devices: of the run; None: none is present (`Devices.planned`).
      trains: whether parameters have gradients; False: for inference.

    Raises `ConfigError` if the configuration breaks a rule of sizes, devices or schedules.

    `parallel.schedule` must exist for the given `parallel.pp`, `parallel.virtual_stages`,
    `parallel.breadth`, `parallel.slices`, `parallel.in_flight` and microbatches, with
    `parallel.layer_split` giving every stage but the first and the last a layer, and fit within
    `parallel.memory_limit`.

    `parallel.overlap_halves=true` excludes, off the CPU, schedules that run an F and a gradient at
    once (`dualpipe`, `dualpipev`).
    """
    devices = devices or Devices.planned(config)
    config = resolve_sizes(config, devices.count, are_present=devices.are_present)
    check_devices(config, devices, trains=trains)
    try:
        plan = arrange(config, devices)
        _ = plan.tables
    except ScheduleError as error:
        raise ConfigError(f"parallel.schedule={config.parallel.schedule!r}: {error}") from error
    _ = plan.unroll_layers
    if config.parallel.overlap_halves and plan.buffers.pairs:
        raise ConfigError(
            f"parallel.overlap_halves=true with parallel.schedule={config.parallel.schedule!r}: "
            f"this schedule hides the collectives of F behind a gradient of another microbatch; "
            f"set parallel.overlap_halves=false."
        )
    return plan


def arrange(
    config: Config,
    devices: Devices | None = None,
    *,
    seconds: OpSeconds | None = None,
    effort: int | None = None,
    paced: bool = True,
) -> RunPlan:
    """Return the plan of a configuration whose sizes are concrete; no other rules are checked.

    A search minimises `parallel.objective` for the costs of the configuration's own stages. Under
    `parallel.memory_limit` a microbatch takes the bytes that it keeps for B and for W in this
    configuration; without a limit, searches keep to the number of microbatches that their families
    set. Every schedule is validated (`schedule.validate`).

    Args:
      config: of the run.
      devices: of the run; None: none is present (`Devices.planned`).
      seconds: seconds of ops, in place of measured ones and those of the devices.
      effort: of a search, as in `build`; `QUICK` is for comparing many candidates.
      paced: whether to pace the schedule (`schedule.scan.optimize_pace`), as a run does.

    Raises `ScheduleError` if there is no such schedule, none within `parallel.memory_limit`, or a
    stage has fewer layers than are to be offloaded, or none has more than B recomputes.
    """
    devices = devices or Devices.planned(config)
    if config.parallel.vocab_parallel_pp == "auto":
        shared = not devices.on_cpu and _gains_by_sharing(config, devices)
        config = _with_vocabulary(config, shared=shared)
    if config.parallel.layer_split == "balanced":
        return _arrange_balanced(config, devices, seconds, effort, paced=paced)
    seconds = seconds or op_seconds(config, devices.hardware)
    parallel, lockstep = config.parallel, _lockstep_of(config, devices)
    schedule = _schedule_of(config, devices, lockstep, seconds, effort)
    layers = layers_of(config, schedule.placement, devices)
    if config.train.offload_layers > min(layers):
        raise ScheduleError(
            f"train.offload_layers={config.train.offload_layers} exceeds the layers of the "
            f"shortest stage, {min(layers)}: every rank copies as many; offload at most so many."
        )
    if config.train.remat_layers >= max(layers):
        raise ScheduleError(
            f"train.remat_layers={config.train.remat_layers} are all layers of the longest stage, "
            f"{max(layers)}: set train.remat='full' instead, or give fewer."
        )
    plan = RunPlan(config, devices, schedule, layers, lockstep, seconds)
    if parallel.memory_limit:
        limit = activation_limit_of(config, plan.layout, devices.memory)
        with limit.explaining():
            check_memory(schedule, limit.memory, limit.limit, lockstep)
    if paced:
        phased = not lockstep.synchronizes_all and parallel.transfer_ticks != 2
        lockstep = optimize_pace(schedule, plan.costs, lockstep, phased=phased)
    if config.train.remat == "ahead":
        costs = plan.costs_of_stages(recomputes=True)
        schedule, lockstep = recompute_ahead(schedule, costs, lockstep)
    return replace(plan, schedule=schedule, lockstep=lockstep)


def _arrange_balanced(
    config: Config, devices: Devices, seconds: OpSeconds | None, effort: int | None, *, paced: bool
) -> RunPlan:
    """Return the plan of the balanced layer split, which is concrete in its configuration.

    Where that exceeds `parallel.memory_limit`, the plan has the next split, with smaller stages,
    that does not; raises `ScheduleError` if there is none.
    """
    refused: list[ScheduleError] = []
    for layers in balanced_splits(config, _placement_of(config), devices.hardware):
        parallel = structs.replace(config.parallel, layer_split=layers)
        concrete = structs.replace(config, parallel=parallel)
        try:
            return arrange(concrete, devices, seconds=seconds, effort=effort, paced=paced)
        except ScheduleError as error:
            refused = refused or [error]
    raise refused[0]


def layers_of(config: Config, placement: Placement, devices: Devices) -> tuple[int, ...]:
    """Number of layers per stage; raises `ScheduleError` if the layers do not fit the stages."""
    parallel = config.parallel
    if parallel.layer_split == "balanced":
        return next(balanced_splits(config, placement, devices.hardware))
    return assign_layers(
        config.model.pipeline_layers, placement.stages, parallel.layer_split,
        weights=(parallel.input_weight, parallel.output_weight),
        pinned=(parallel.first_stage_layers, parallel.last_stage_layers),
    )  # fmt: skip


def _with_vocabulary(config: Config, *, shared: bool) -> Config:
    parallel = structs.replace(config.parallel, vocab_parallel_pp=shared)
    return structs.replace(config, parallel=parallel)


def _gains_by_sharing(config: Config, devices: Devices) -> bool:
    """Whether a vocabulary-parallel embedding and head are possible, and take no longer.

    They may take 1 % longer. Both variants are timed with one order of actions, searched for
    embedding and head on the end stages. A run's own measurements and the memory of a device are
    not used, since each start of a run must decide alike.
    """
    parallel = config.parallel
    if parallel.pp == 1 or parallel.defer_embed_head or config.train.fused_steps > 1:
        return False
    if config.parallel.costs == "measure":
        config = structs.replace(config, parallel=structs.replace(config.parallel, costs=""))
    devices = replace(devices, memory=devices.hardware.sheet.memory)
    try:
        own = arrange(_with_vocabulary(config, shared=False), devices, effort=QUICK, paced=False)
        with_shared = _with_vocabulary(config, shared=True)
        shared = replace(
            own,
            config=with_shared,
            layers=layers_of(with_shared, own.schedule.placement, devices),
            lockstep=replace(own.lockstep, vocab_parallel=True),
        )
        return _scan_time(shared) <= _scan_time(own) * _AS_FAST
    except ScheduleError:
        return False


def _scan_time(plan: RunPlan) -> float:
    return scan_time(plan.schedule, plan.costs, plan.lockstep)


def _lockstep_of(config: Config, devices: Devices) -> Lockstep:
    """How the scan lays a configuration's schedule out in ticks.

    On CPU a collective blocks whatever compute stands next to it, and all ranks meet in it. So
    messages have no tick of their own there, and halves of a cell in one branch would gain nothing.
    Paired halves read residuals before their branch, in every tick, so there are none if residuals
    wait on the host, or are recomputed in the same tick.

    Raises `ScheduleError` for embedding and head that are both vocabulary-parallel and deferred.
    """
    parallel, on_cpu = config.parallel, devices.on_cpu
    return Lockstep(
        transfer_ticks=parallel.transfer_ticks or (1 if on_cpu else 2),
        in_flight=parallel.in_flight or None,
        vocab_parallel=bool(parallel.vocab_shared_by),
        defer_embed_head=parallel.defer_embed_head,
        pairs=not (on_cpu or config.train.offload_layers or config.train.remat == "ahead"),
        synchronizes_all=on_cpu,
    )


def _schedule_of(
    config: Config, devices: Devices, lockstep: Lockstep, seconds: OpSeconds, effort: int | None
) -> Schedule:
    """Build the configuration's schedule; a searched one for its costs and memory limit."""
    parallel, family = config.parallel, find_family(config.parallel.schedule)
    sizes, options = _build_options(config)
    if not family.is_searched:
        return _build(*sizes, tuple(options.items()))
    placement = family.place_stages(parallel.pp)
    layers = layers_of(config, placement, devices)
    costs = partial(seconds.costs, layers, shared_by=parallel.vocab_shared_by)
    options |= {
        "objective": parallel.objective,
        "effort": effort,
        "costs": costs(),
        "unsplit_costs": costs(split=False),
    }
    if parallel.objective == "scan":
        options["lockstep"] = replace(lockstep, in_flight=None)
    if not parallel.memory_limit:
        return _build(*sizes, tuple(options.items()))
    limit = activation_limit_of(config, layout_of(config, placement, layers), devices.memory)
    options |= {"memory": limit.memory, "memory_limit": limit.limit}
    with limit.explaining():
        return _build(*sizes, tuple(options.items()))


def _placement_of(config: Config) -> Placement:
    """The placement of the configuration's schedule, which no search decides."""
    family = find_family(config.parallel.schedule)
    if family.is_searched:
        return family.place_stages(config.parallel.pp)
    return schedule_of(config).placement


def schedule_of(config: Config) -> Schedule:
    """The configuration's schedule, which is not searched; raises `ScheduleError` without one."""
    sizes, options = _build_options(config)
    return _build(*sizes, tuple(options.items()))


def _build_options(config: Config) -> tuple[tuple[str, int, int], dict[str, Any]]:
    """The sizes of the configuration's schedule, and the options that its stages do not change."""
    parallel = config.parallel
    options: dict[str, Any] = {
        "virtual_stages": parallel.virtual_stages or None,
        "breadth": parallel.breadth or None,
        "slices": parallel.slices,
    }
    if parallel.schedule_file:
        options["path"] = parallel.schedule_file
    name = find_family(parallel.schedule).name
    return (name, parallel.pp, config.train.grad_accum_steps), options


@lru_cache(maxsize=128)  # "auto" compares plans of one schedule, a search of layouts of many
def _build(name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    schedule = build(name, pp=pp, microbatches=microbatches, **dict(options))
    validate(schedule)
    return schedule
