"""The peak number of live (stage, microbatch) pairs on each rank, in closed form.

A pair is live from its F to its W, or to its unsplit BW. `k` is the number of microbatches of a
round of the interleaved schedules, M / max(1, M div P). Sources: as in `bubbles`; the interleaved
forms follow from the warm-up of Narayanan et al. 2021, section 2.2.
"""

from collections.abc import Callable


def peak_held(
    schedule: str, pp: int, microbatches: int, virtual_stages: int | None = None
) -> tuple[int, ...]:
    """Return the peak of every rank for the named schedule.

    For searched schedules, and for 1f1b_v with fewer than 2P microbatches, it is the limit that
    they keep. `virtual_stages` None is the schedule's own default.

    Raises `ValueError` for a schedule whose peak is not known beforehand.

    >>> peak_held("1f1b", 4, 8), peak_held("zb_h1", 4, 8)
    ((4, 3, 2, 1), (4, 4, 4, 4))
    """
    if schedule not in PEAKS:
        raise ValueError(
            f"no closed form for the peak of {schedule!r}: use one of {', '.join(PEAKS)}, or "
            f"simulate it."
        )
    v = virtual_stages or _DEFAULT_STAGES.get(schedule, 1)
    formula = PEAKS[schedule]
    return tuple(min(microbatches * v, formula(pp, rank, microbatches, v)) for rank in range(pp))


def _round(pp: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // pp)


_DEFAULT_STAGES = {
    "interleaved_1f1b": 2, "interleaved_zb": 2,
    "zbv": 2, "v_half": 2, "v_min": 2, "1f1b_v": 2, "dualpipev": 2,
}  # fmt: skip

# (P, rank, M, v) -> pairs, before the limit M v is applied.
PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda pp, r, m, v: m,
    "bfs": lambda pp, r, m, v: m * v,
    "1f1b": lambda pp, r, m, v: pp - r,
    "interleaved_1f1b": lambda pp, r, m, v: (v - 1) * _round(pp, m) + 2 * (pp - 1 - r) + 1,
    "interleaved_zb": lambda pp, r, m, v: (v - 1) * _round(pp, m) + pp,
    "zb_h1": lambda pp, r, m, v: pp,
    "zb_h2": lambda pp, r, m, v: 2 * pp - 1,
    "zb_auto": lambda pp, r, m, v: 2 * pp,
    "zbv": lambda pp, r, m, v: 2 * pp,
    "v_half": lambda pp, r, m, v: pp + 2,
    "v_min": lambda pp, r, m, v: 2 * ((pp + 4) // 3),
    "1f1b_v": lambda pp, r, m, v: 2 * -(-(2 * pp + 1) // 3),
    "dualpipe": lambda pp, r, m, v: pp + 1,
    "dualpipev": lambda pp, r, m, v: 2 * pp + 1,
}
