"""Op times measured on a run's own mesh before its first step (`parallel.costs = "measure"`)."""

from statistics import median

import jax
import msgspec

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning import (
    Candidate,
    Choice,
    Hardware,
    OpSeconds,
    analytic,
    chosen,
    decided,
    estimate,
    own_costs,
    read_own,
    write_own,
)
from jaxpipe.planning.candidates import variant_of
from jaxpipe.runtime import processes
from jaxpipe.schedule import find_family
from jaxpipe.training.op_timers import TransferTimer, op_seconds
from jaxpipe.training.trainer import Trainer

_REPEATS = 5
_LEAST = {  # what an objective minimises: a description, and the field of a `Report`
    "span": ("the longest span of a rank", "max_span"),
    "makespan": ("a step of ranks that run freely", "makespan"),
    "scan": ("a step", "scan_makespan"),
}


def measure(config: Config, *, memory: float | None = None) -> str:
    """Measure op times and write them to a file, unless it exists; return a message for the user.

    All processes of a run must call it. `memory` is as in `chosen`. Raises `ConfigError` where the
    file cannot be written.
    """
    config = decided(config, jax.default_backend())
    if not processes.largest(int(read_own(config) is None)):  # all read before the first writes
        return f"ops were measured before: {own_costs(config)}"
    seconds = _measured(Trainer(config))
    try:
        with processes.first_before_others("costs"):
            if processes.first():
                write_own(config, seconds)
    except OSError as error:
        raise ConfigError(
            f"{own_costs(config)} cannot be written ({error.strerror}): make run.dir a writable "
            f"directory, or choose another."
        ) from error
    layer = seconds.layer
    ops = ", ".join(f"{op} {1e3 * getattr(layer, op):.3g}" for op in ("F", "B", "W"))
    return (
        f"ops measured on this mesh, in ms of a layer: {ops}; a message: "
        f"{1e3 * seconds.transfer:.3g}; kept in {own_costs(config)}\n{_gain(config, memory)}"
    )


def _measured(trainer: Trainer) -> OpSeconds:
    turns = 2 if trainer.mesh.devices.flat[0].platform == "cpu" else 8
    seconds = op_seconds(trainer, turns=turns, repeats=_REPEATS)
    transfer = 0.0
    if trainer.config.parallel.pp > 1:
        timer = TransferTimer(trainer)
        transfer = median(timer.seconds() for _ in range(_REPEATS))
    return msgspec.convert(seconds | {"transfer": transfer}, OpSeconds)


def _gain(config: Config, memory: float | None) -> str:
    """A message: how much the measured op times improve the objective, by the simulator."""
    what, field = _LEAST[config.parallel.objective]
    seconds, platform = read_own(config), jax.default_backend()

    def least(choice: Choice) -> float:
        own = Candidate(variant_of(config), choice)
        return getattr(estimate(config, own, seconds).report, field)

    found = chosen(config, platform=platform, memory=memory)
    name, after = found.schedule.name, least(found)
    if not find_family(config.parallel.schedule).is_searched:
        return f"{name} has one order, whatever ops cost; {what} by the simulator: {after:.4g} s"
    sheet = analytic(config, Hardware())
    before = least(chosen(config, platform=platform, memory=memory, seconds=sheet))
    return (
        f"{name}, searched for these seconds; {what} by the simulator: {after:.4g} s, "
        f"{1 - after / before:.1%} less than in the order for those of a data sheet"
    )
