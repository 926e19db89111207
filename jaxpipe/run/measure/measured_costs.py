"""Op times measured on a run's own mesh before its first step (`parallel.costs = "measure"`)."""

from statistics import median

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.planning import (
    OpSeconds,
    RunPlan,
    analytic,
    arrange,
    estimate,
    own_costs,
    write_own,
)
from jaxpipe.run.measure.op_timers import op_seconds
from jaxpipe.run.measure.step_timers import TransferTimer
from jaxpipe.runtime.group import Group
from jaxpipe.schedules import find_family
from jaxpipe.training.trainer import Trainer

_REPEATS = 5
_LEAST = {  # what an objective minimises: a description, and the field of a `Report`
    "span": ("the longest span of a rank", "max_span"),
    "makespan": ("a step of ranks that run asynchronously", "makespan"),
    "scan": ("a step", "scan_makespan"),
}


def measure(plan: RunPlan, group: Group) -> tuple[RunPlan, str]:
    """Measure op times and store them, unless the plan has them; return its plan and a message.

    The plan returned is resolved for the measured seconds of process 0. All processes of the group
    must call it. Raises `ConfigError` where the file cannot be written.
    """
    config, path = plan.config, own_costs(plan.config)
    if plan.seconds != analytic(config, plan.devices.hardware):
        return plan, f"ops were measured before: {path}"
    seconds = _measure_ops(Trainer(plan))
    try:
        with group.first_before_others("file of costs"):
            if group.is_first:
                write_own(config, seconds)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): make run.dir a writable "
            f"directory, or choose another."
        ) from error
    measured = arrange(config, plan.devices)
    layer = seconds.layer
    ops = ", ".join(f"{op} {1e3 * getattr(layer, op):.3g}" for op in ("F", "B", "W"))
    return measured, (
        f"ops measured on this mesh, in ms of a layer: {ops}; a message: "
        f"{1e3 * seconds.transfer:.3g}; kept in {path}\n{_describe_gain(plan, measured)}"
    )


def _measure_ops(trainer: Trainer) -> OpSeconds:
    seconds = op_seconds(trainer, repeats=_REPEATS)
    transfer = 0.0
    if trainer.config.parallel.pp > 1:
        timer = TransferTimer(trainer)
        transfer = median(timer.seconds() for _ in range(_REPEATS))
    return msgspec.convert(seconds | {"transfer": transfer}, OpSeconds)


def _describe_gain(plan: RunPlan, measured: RunPlan) -> str:
    """A message: how much the measured op times improve the objective, by the simulator."""
    what, field = _LEAST[plan.config.parallel.objective]
    before, after = (
        getattr(estimate(one, measured.seconds).report, field) for one in (plan, measured)
    )
    name = measured.schedule.name
    if not find_family(plan.config.parallel.schedule).is_searched:
        return f"{name} has one order, whatever ops cost; {what} by the simulator: {after:.4g} s"
    return (
        f"{name}, searched for these seconds; {what} by the simulator: {after:.4g} s, "
        f"{1 - after / before:.1%} less than in the order for those of a data sheet"
    )
