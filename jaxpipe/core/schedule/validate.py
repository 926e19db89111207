"""Proof that a schedule is complete, well placed and free of deadlock."""

from collections import Counter, defaultdict

from jaxpipe.core.schedule.action import Action, Op, Schedule, ScheduleError
from jaxpipe.core.schedule.topological_order import sort_topologically


def validate(schedule: Schedule) -> None:
    """Check all rules; raise `ScheduleError` for the first broken one, naming rank and action.

    The rules:
      - Each action is on the rank that computes its stage.
      - Each (stage, microbatch) has one F, and either one BW, or one B and one W, or, if the whole
        schedule is forward only, no gradient.
      - Either every (stage, microbatch) has one R, between its F and its B or BW, or none has.
      - In a stage, slices of a sequence are on one rank, forwards in order, gradients in reverse.
      - With `updates`, each stage has one U per step, after its gradients of that step and before
        its forwards of the next.
      - Every action can start once the actions before it have run (no deadlock).
    """
    _check_placement(schedule)
    _check_complete(schedule)
    _check_recomputations(schedule)
    _check_updates(schedule)
    _check_slices(schedule)
    sort_topologically(schedule)


def _check_placement(schedule: Schedule) -> None:
    pp, stages = schedule.pp, schedule.stages
    if len(schedule.ranks) != pp:
        raise ScheduleError(f"placement has {pp} ranks but {len(schedule.ranks)} orders are given.")
    if missing := set(range(pp)) - set(schedule.placement.rank_of):
        raise ScheduleError(f"rank {min(missing)} owns no stage: give every rank a stage.")
    for rank, action in schedule.actions():
        if not (0 <= action.stage < stages and 0 <= action.microbatch < schedule.microbatches):
            raise ScheduleError(
                f"rank {rank}, {action}: stage or microbatch out of range, with {stages} stages "
                f"and {schedule.microbatches} microbatches."
            )
        owner = schedule.placement.rank(action.stage, action.microbatch)
        if owner != rank:
            raise ScheduleError(f"rank {rank}, {action}: stage {action.stage} is on rank {owner}.")


def _check_complete(schedule: Schedule) -> None:
    seen = Counter(action for _, action in schedule.actions())
    for action, times in seen.items():
        if times > 1:
            raise ScheduleError(f"{action} appears {times} times: it must appear once.")
    ops_of_pair: dict[tuple[int, int], set[Op]] = defaultdict(set)
    for op, stage, m in seen:
        if op not in (Op.R, Op.U):
            ops_of_pair[stage, m].add(op)
    trained = any(op is not Op.F for op, _, _ in seen)
    legal = ({Op.F, Op.BW}, {Op.F, Op.B, Op.W}) if trained else ({Op.F},)
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            ops = ops_of_pair[stage, m]
            if ops not in legal:
                have = " ".join(str(Action(op, stage, m)) for op in Op if op in ops) or "nothing"
                raise ScheduleError(
                    f"stage {stage}, microbatch {m} has {have}: it needs F and then BW, "
                    f"or F, B and W{'' if trained else ', or F alone in every stage'}."
                )


def _check_recomputations(schedule: Schedule) -> None:
    """Check that each R of a (stage, microbatch) comes between its F and its B or BW."""
    if not schedule.recomputes:
        return
    if schedule.slices > 1:
        raise ScheduleError(
            f"slices={schedule.slices} with R: it would compute a slice with the state of later "
            f"ones; leave R out, so that B recomputes, or use one slice."
        )
    done: set[Action] = set()
    for rank, action in schedule.actions():
        op, stage, m = action
        needed = Op.F if op is Op.R else Op.R if op.computes_dx else None
        if needed and (before := Action(needed, stage, m)) not in done:
            raise ScheduleError(
                f"rank {rank}, {action}: it must stand after {before}: where one stage and "
                f"microbatch has an R, every one needs F, R, and then B or BW."
            )
        done.add(action)


def _check_updates(schedule: Schedule) -> None:
    """Check that each stage's actions of a step come between its updates of adjacent steps."""
    steps = schedule.updates or 1
    if schedule.microbatches % steps:
        raise ScheduleError(
            f"{schedule.microbatches} microbatches are not {steps} steps of as many each: use a "
            f"multiple."
        )
    length = schedule.microbatches // steps
    updated = [0] * schedule.stages
    for rank, action in schedule.actions():
        step, complete = action.microbatch // length, updated[action.stage]
        if step != complete:
            raise ScheduleError(
                f"rank {rank}, {action}: it is of step {step}, and must stand after so many "
                f"updates of its stage, but stands after {complete}."
            )
        updated[action.stage] += action.op is Op.U
    for stage, times in enumerate(updated):
        if times != schedule.updates:
            raise ScheduleError(
                f"stage {stage} has {times} updates: it needs one after each of "
                f"{schedule.updates} steps."
            )


def _check_slices(schedule: Schedule) -> None:
    """Check the order of slices: F reads the state of earlier slices, B the gradient of later."""
    slices = schedule.slices
    if schedule.microbatches % slices:
        raise ScheduleError(
            f"{schedule.microbatches} slices are not whole sequences of {slices}: use a multiple."
        )
    if slices == 1:
        return
    when = {
        action: (rank, position)
        for rank, order in enumerate(schedule.ranks)
        for position, cell in enumerate(order)
        for action in cell.actions
    }
    for action, (rank, position) in when.items():
        forward = action.op is Op.F
        earlier = action.microbatch - 1 if forward else action.microbatch + 1
        if action.op in (Op.W, Op.R) or earlier // slices != action.microbatch // slices:
            continue
        before = action._replace(microbatch=earlier)
        other = when.get(before)
        if other is None:  # a gradient may be split in one slice and unsplit in the next
            other = when[before._replace(op=Op.B if action.op is Op.BW else Op.BW)]
        if other[0] != rank or other[1] >= position:
            raise ScheduleError(
                f"rank {rank}, {action}: it must follow {before} on its rank: slices of a sequence "
                f"go forward in order, and back in reverse."
            )
