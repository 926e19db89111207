"""Lower bounds on the seconds and bytes of a configuration, which need no simulation."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.schedule import Costs, Op, Placement, Schedule
from jaxpipe.core.schedule.simulate import peak_live
from jaxpipe.planning.cost.costs import LayerCosts, costs_of, ring_costs
from jaxpipe.planning.cost.seconds import OpSeconds, Recomputation

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout


@dataclass(frozen=True)
class ScheduleFacts:
    """What the bounds need of a schedule, for any costs.

    Attributes:
      placement: the pipeline rank of every stage.
      forwards: microbatches x slices.
      is_split: whether some gradient is B and W, and not BW.
      live: by pipeline rank, the most (microbatch, stage) pairs that wait for B and for W at once,
        or fewer.
    """

    placement: Placement
    forwards: int
    is_split: bool
    live: tuple[tuple[int, int], ...] = ((1, 1),)

    @classmethod
    def of_schedule(cls, schedule: Schedule, *, in_order: bool) -> "ScheduleFacts":
        """The facts of a schedule; `in_order`: whether ranks keep its order (`Lockstep`)."""
        live = [(1, 1)]
        if in_order:
            for_b, for_w = (peak_live(schedule, (op, Op.BW)) for op in (Op.B, Op.W))
            live = list(zip(for_b, for_w))
        is_split = schedule.splits_gradients
        return cls(schedule.placement, schedule.microbatches, is_split, tuple(live))


def least_seconds(facts: ScheduleFacts, costs: Costs) -> float:
    """Return a lower bound on the time of the scan.

    Proof. A cell takes the time of its actions, less the collectives of one that hide behind
    compute of the other, so at least what its actions take without collectives; call that an
    action's work. Cells of a rank follow each other, so a rank is busy for the work of its stages,
    once for each forward. It begins with an F of one of its stages, s, which needs the F of one
    microbatch in all stages before s, one after the other. Where gradients are not split, the last
    action of a rank is a BW, because every F has one after it on the same rank; if it is of stage
    s, its result passes the BW of all stages before s, one after the other. So for every rank the
    time is at least the work before its first action + its own + the work after its last one, with
    the least s of the rank. R is part of a rank's work, but no other rank waits for it. On a
    bidirectional placement microbatches enter at both ends: there the time is at least the mean
    work of a rank.
    """
    placement, forwards = facts.placement, facts.forwards
    seconds = []
    for op in ("F", "B", "W"):
        hidden = getattr(costs.exchange, op) if costs.exchange else (0.0,) * placement.stages
        seconds.append([all_ - part for all_, part in zip(getattr(costs, op), hidden)])
    recomputed = costs.by_stage(Op.R, placement.stages)
    work = [sum(ops) for ops in zip(*seconds, recomputed)]
    if placement.mirrored_from is not None:
        return forwards * sum(work) / placement.pp
    forward, backward = seconds[0], [b + w for b, w in zip(*seconds[1:])]
    least = 0.0
    for rank in range(placement.pp):
        stages = [stage for stage, of in enumerate(placement.rank_of) if of == rank]
        ends = sum(forward[: min(stages)]) + (0 if facts.is_split else sum(backward[: min(stages)]))
        least = max(least, ends + forwards * sum(work[stage] for stage in stages))
    return least


def with_least_recomputation(seconds: OpSeconds, layers: int) -> OpSeconds:
    """Return seconds of ops that no number of recomputed layers (`train.remat_layers`) is below.

    Ops of recomputed layers take other times, and what an op takes less, all `layers` take less.
    """
    least = (min(getattr(seconds.again, op), 0.0) for op in ("F", "B", "W", "BW"))
    return structs.replace(seconds, again=Recomputation(layers, *least))


def least_residuals(config: Config, facts: ScheduleFacts, layout: "StageLayout") -> int:
    """Return a lower bound on the bytes of residuals of a device.

    With the bytes that do not depend on the order of actions (`rank_bytes` without tables) it is
    one on all bytes. Proof. Ranks that keep their order have, at some tick, as many residuals live
    as the order has forwards without their B, or W, and a ring buffer is at least as long as what
    one rank has live at once. Of a rank that does not, one microbatch is live. With R, residuals of
    one microbatch are live at some time, and what R reads of all but that one.
    """
    away = layout.first_ring_slots(config.train.offload_layers)
    here = [kind for ring, kind in enumerate(ring_costs(config, layout)) if ring not in away]

    def least(kind: LayerCosts) -> int:
        if kind.R:
            one, most = kind.for_b + kind.for_w, max(b for b, _ in facts.live)
            return max(one, (most - 1) * kind.for_r)
        return max(b * kind.for_b + w * kind.for_w for b, w in facts.live)

    return sum(map(least, here))


def least_layout(config: Config) -> "StageLayout":
    """Return a layout with the fewest layer slots of a mesh, for `rank_bytes` without tables.

    Every slot is a chunk of its own, so that only one layer is gathered at a time.

    Proof that none has fewer: all ranks have the same slots, a slot holds one layer of its kind on
    each rank, and every layer is in a slot; so of n layers of a kind on P ranks a rank has at least
    n / P slots.
    """
    from jaxpipe.core.mesh import StageLayout

    counts = Counter(costs_of(config).order)
    slots = Counter({kind: -(-count // config.parallel.pp) for kind, count in counts.items()})
    return StageLayout(
        (1,) * slots.total(), Placement.loop(1, slots.total()), tuple(slots.elements())
    )
