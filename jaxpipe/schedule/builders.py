"""GPipe and 1F1B: every microbatch forward, then backward; and one forward, one backward.

Both have the bubble (P-1)/(M+P-1) with equal work on every rank; they differ in how many
microbatches a rank holds: GPipe all M, 1F1B at most P - r on rank r.
"""

from jaxpipe.schedule.action import Action, Op, Placement, Schedule, ScheduleError


def _forward(stage: int, microbatches: range) -> list[Action]:
    return [Action(Op.F, stage, m) for m in microbatches]


def _backward(stage: int, microbatches: range) -> list[Action]:
    return [Action(Op.BW, stage, m) for m in microbatches]


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in microbatch order (Huang et al. 2019, Fig. 2c).

    >>> gpipe(2, 2).orders()
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    every = range(microbatches)
    ranks = tuple((*_forward(r, every), *_backward(r, every)) for r in range(pp))
    return Schedule("gpipe", Placement.loop(pp), microbatches, ranks)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """Warm up with P-1-r forwards, then alternate one F and one BW, then cool down.

    PipeDream-flush (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training",
    Fig. 2). Fewer microbatches than ranks are legal here: the warm-up is then cut at M.

    >>> print("\\n".join(" ".join(order) for order in one_f_one_b(2, 3).orders()))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks = []
    for r in range(pp):
        warmup = min(microbatches, pp - 1 - r)
        steady = microbatches - warmup
        order = _forward(r, range(warmup))
        for m in range(steady):
            order += [Action(Op.F, r, warmup + m), Action(Op.BW, r, m)]
        order += _backward(r, range(steady, microbatches))
        ranks.append(tuple(order))
    return Schedule("1f1b", Placement.loop(pp), microbatches, tuple(ranks))


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Every microbatch forward through every stage and nothing else: evaluation.

    >>> forward_only(Placement.loop(2), 2).orders()
    [['0F0', '0F1'], ['1F0', '1F1']]
    """
    ranks: list[list[Action]] = [[] for _ in range(placement.pp)]
    for stage, rank in enumerate(placement.rank_of):
        ranks[rank] += _forward(stage, range(microbatches))
    return Schedule("forward_only", placement, microbatches, tuple(map(tuple, ranks)))


BUILDERS = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build(name: str, *, pp: int, microbatches: int) -> Schedule:
    """The named schedule for `pp` ranks and `microbatches` microbatches a step.

    Raises `ScheduleError` for an unknown name or for sizes below one.
    """
    if name not in BUILDERS:
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(BUILDERS)}.")
    if pp < 1 or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs pp >= 1 and microbatches >= 1, got pp={pp} and "
            f"microbatches={microbatches}: raise the one below 1."
        )
    return BUILDERS[name](pp, microbatches)
