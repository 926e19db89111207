"""What a configuration runs: its schedule, the layers of every stage, its ticks, what ops cost.

Train, plan, profile and the check for GPUs all ask `chosen`, so they mean the same run.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxpipe.config import Config
from jaxpipe.planning.hardware import Hardware, OpSeconds, analytic, read_measured
from jaxpipe.schedule import Lockstep, Schedule, Tables, assign_layers, build, family_of, lower


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


def chosen(
    config: Config,
    *,
    platform: str | None = None,
    seconds: OpSeconds | None = None,
    effort: int | None = None,
) -> Choice:
    """What a run of a configuration executes, searched once where its builder searches.

    A search takes the costs of the configuration's own stages, measured (`parallel.costs`) or those
    of an H100, and makes least what `parallel.objective` says.

    Args:
      config: of the run.
      platform: of its devices; None: CPUs if the configuration has virtual ones, else GPUs.
      seconds: costs of ops for a search, if not those above.
      effort: of a search, as in `build`.

    Raises `ScheduleError` where there is no such schedule.
    """
    parallel = config.parallel
    lockstep = lockstep_of(config, platform)
    family = family_of(parallel.schedule)
    options: dict[str, Any] = {
        "virtual_stages": parallel.virtual_stages or None,
        "memory_limit": parallel.memory_limit or None,
        "slices": parallel.slices,
    }
    if parallel.schedule_file:
        options["path"] = parallel.schedule_file
    if family.searched:
        layers = layers_of(config, parallel.pp * family.stages)
        seconds = seconds or op_seconds(config)
        options |= {
            "costs": seconds.costs(layers, shared_by=parallel.ends_shared_by),
            "objective": parallel.objective,
            "effort": effort,
        }
        if parallel.objective == "lockstep":
            options["transfer_ticks"] = lockstep.transfer_ticks
    sizes = parallel.pp, config.train.grad_accum_steps
    schedule = _built(family.name, *sizes, tuple(options.items()))
    return Choice(schedule, layers_of(config, schedule.stages), lockstep)


def layers_of(config: Config, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages; raises `ScheduleError` where they cannot be filled."""
    parallel = config.parallel
    return assign_layers(
        config.model.n_layers, stages, parallel.layer_split,
        weights=(parallel.input_weight, parallel.output_weight),
        pinned=(parallel.first_stage_layers, parallel.last_stage_layers),
    )  # fmt: skip


def lockstep_of(config: Config, platform: str | None = None) -> Lockstep:
    """How the scan lays a configuration's schedule out in ticks; `platform` as in `chosen`.

    On CPU messages take no tick of their own, since collectives wait there, whatever stands beside
    them; and for the same reason nothing is gained by halves of a cell that may overlap.

    Raises `ScheduleError` for ends that are both shared and deferred.
    """
    parallel = config.parallel
    on_cpu = (platform or ("cpu" if config.runtime.cpu_devices else "gpu")) == "cpu"
    return Lockstep(
        transfer_ticks=parallel.transfer_ticks or (1 if on_cpu else 2),
        in_flight=parallel.in_flight or None,
        vocab_parallel=parallel.vocab_parallel_pp,
        defer_ends=parallel.defer_ends,
        pairs=not on_cpu,
    )


def op_seconds(config: Config, hardware: Hardware | None = None) -> OpSeconds:
    """Measured seconds where the configuration names a file of them, else from the data sheet."""
    if config.parallel.costs:
        return read_measured(Path(config.parallel.costs))
    return analytic(config, hardware or Hardware())


@cache
def _built(name: str, pp: int, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    return build(name, pp=pp, microbatches=microbatches, **dict(options))
