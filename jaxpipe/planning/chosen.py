"""What a configuration has chosen: its schedule, the layers of every stage, what ops cost."""

from functools import cache
from pathlib import Path
from typing import Any

from jaxpipe.config import Config
from jaxpipe.planning.hardware import Hardware, OpSeconds, analytic, read_measured
from jaxpipe.schedule import Lockstep, Schedule, assign_layers, build, family_of


def layers_of(config: Config, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages; raises `ScheduleError` where they cannot be filled."""
    parallel = config.parallel
    return assign_layers(
        config.model.n_layers, stages, parallel.layer_split,
        weights=(parallel.input_weight, parallel.output_weight),
        pinned=(parallel.first_stage_layers, parallel.last_stage_layers),
    )  # fmt: skip


def schedule_of(config: Config) -> Schedule:
    """The schedule that a configuration names, searched once where its builder searches.

    A search takes the costs of the configuration's own stages, measured (`parallel.costs`) or those
    of an H100, and pays what the scan pays if it is told to by `parallel.objective`. Raises
    `ScheduleError` where there is none.
    """
    parallel = config.parallel
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
        options["costs"] = op_seconds(config).costs(layers, shared_by=parallel.ends_shared_by)
        options["objective"] = parallel.objective
        if parallel.objective == "lockstep":
            options["transfer_ticks"] = parallel.transfer_ticks or 2
    return _built(family.name, parallel.pp, config.train.grad_accum_steps, tuple(options.items()))


def lockstep_of(config: Config, *, on_cpu: bool) -> Lockstep:
    """How the scan lays a configuration's schedule out in ticks, on that kind of device.

    On CPU messages take no tick of their own, since collectives wait there, whatever stands beside
    them; and for the same reason nothing is gained by halves of a cell that may overlap.

    Raises `ScheduleError` for ends that are both shared and deferred.
    """
    parallel = config.parallel
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
