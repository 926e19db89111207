"""Which layers the program repeats in a loop (`parallel.unroll_layers`)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from jaxpipe.config import ConfigError

if TYPE_CHECKING:
    from jaxpipe.planning.resolve import RunPlan

UNROLLED = 4  # layers in a row that are unrolled by default, where a loop hides as many collectives


def unroll_layers(plan: "RunPlan") -> int | None:
    """Return how many layers of a kind in a row are unrolled; None: all, and there is no loop.

    By default up to `UNROLLED` are unrolled on CPU and in a pure pipeline (dp and tp are 1). All
    are unrolled where no loop will do, and on GPUs whose layers have collectives: nothing moves
    from one iteration to another, so a loop hides fewer of them (`core/executor/README.md`). So are
    those with 8-bit products, to which XLA gives no slice of a stack: a loop would copy every
    gradient sum out and back.

    `parallel.unroll_layers`, if it is above 0 and below the layers of a kind that a pipeline rank
    runs in a row, excludes `train.offload_layers`, off the CPU schedules that run an F and a
    gradient at once (`dualpipe`, `dualpipev`), and optimizers that update neither elementwise nor
    matrix by matrix (`adafactor`, `schedule_free`, and your own).
    """
    given, reason = plan.config.parallel.unroll_layers, _reason(plan)
    if reason is None:
        parallel, train = plan.config.parallel, plan.config.train
        is_plain = parallel.dp * parallel.tp == 1 and train.fp8 == "none"
        return given or (UNROLLED if plan.devices.on_cpu or is_plain else None)
    longest = max(map(len, replace(plan.layout, unroll=given or None).runs))
    if longest > 1:
        raise ConfigError(
            f"parallel.unroll_layers={given} makes a loop of {longest} layers, but {reason}: leave "
            f"parallel.unroll_layers 0, or give at least {longest}."
        )
    return None


def unroll_if_needed(plan: "RunPlan") -> "RunPlan":
    """Return the plan with `parallel.unroll_layers` 0 if it excludes the loop that this asks for.

    A loop that suits one schedule is no reason to leave out others.
    """
    try:
        _ = plan.unroll_layers
    except ConfigError:
        parallel = structs.replace(plan.config.parallel, unroll_layers=0)
        return replace(plan, config=structs.replace(plan.config, parallel=parallel))
    return plan


def _reason(plan: "RunPlan") -> str | None:
    """Return why no loop can run over layers; None: one can."""
    from jaxpipe.optimizer import kind_of

    config = plan.config
    if config.train.offload_layers:
        return (
            f"the copies of train.offload_layers={config.train.offload_layers} overlap with the "
            f"next layer, and none with the next iteration of a loop"
        )
    if plan.buffers.pairs:
        return (
            f"parallel.schedule={config.parallel.schedule!r} pairs the layers of an F and of a "
            f"gradient one by one"
        )
    kind = kind_of(config.optimizer.name)
    if not (kind.is_elementwise or kind.is_per_matrix):
        return (
            f"optimizer.name={config.optimizer.name!r} would not update a stack of layers with the "
            f"bits of single layers"
        )
    return None
