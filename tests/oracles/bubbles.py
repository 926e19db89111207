"""Idle time and memory of a rank in closed form, to check simulations.

B is the gradient of a stage's *input* alone, as everywhere in jaxpipe and in Qi et al. 2024; the
README of DeepSeek's DualPipe calls the *whole* backward B. `OpTimes` names both and can be built
from either. Times are those of one stage: where a rank has v stages, each has 1/v of its layers.

| schedule | idle time of a rank | exact for |
|---|---|---|
| gpipe, 1f1b, interleaved_1f1b, bfs | (P-1)(F+B+W) | M >= P (interleaved: a multiple of P) |
| zb_h1, interleaved_zb | (P-1)(F+B-W) | M >= P, W <= F and W <= B |
| zb_h2 | (P-1)(F+B-2W) | M >= 2P, W <= F and W <= B, as span |
| dualpipe | (P/2-1)(pair + BW - 3W) | M >= 2P; B = F, W <= F, pair = F + BW |
| dualpipev | (P-1)(pair + BW - 3W) | the same, on P ranks with 2P stages |

The two DualPipe forms are also exact for F = B = W and 2F <= pair <= 3F, on the rank that idles
most. Idle time is measured from the step's first start to its last end, or, where the table says
span, from a rank's own first start to its own last end. Transfers take no time.

Sources: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", Table 2 and section 2.3; Narayanan et
al. 2021, section 2.2 (interleaved); Lamy-Poirier 2023 (breadth-first); DeepSeek-AI 2025,
"DualPipe", README (its P counts stages, hence the two last rows).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class OpTimes:
    """Times of the ops of one stage and one microbatch, in any one unit.

    >>> OpTimes(F=1, B=1, W=1) == OpTimes.of_backward(F=1, backward=2, W=1)
    True
    """

    F: float
    B: float  # gradient of the input alone
    W: float  # gradient of the weights
    overlapped: float | None = None  # F and an unsplit backward together; None: their sum

    @classmethod
    def of_backward(
        cls, *, F: float, backward: float, W: float, overlapped: float | None = None
    ) -> "OpTimes":
        """Build from the time of the whole backward, which DeepSeek calls B."""
        return cls(F, backward - W, W, overlapped)

    @property
    def backward(self) -> float:
        """Time of an unsplit backward, BW."""
        return self.B + self.W

    @property
    def pair(self) -> float:
        """Time of F and an unsplit backward in one cell."""
        return self.F + self.backward if self.overlapped is None else self.overlapped


def bubble(schedule: str, pp: int, times: OpTimes) -> float:
    """Return the idle time of a rank in a step on `pp` ranks, in the unit of `times`.

    Raises `ValueError` for a schedule without a closed form, or an odd `pp` of dualpipe.

    >>> bubble("1f1b", 4, OpTimes(F=1, B=1, W=1)), bubble("zb_h1", 4, OpTimes(F=1, B=1, W=1))
    (9, 3)
    """
    if schedule not in BUBBLES:
        raise ValueError(
            f"no closed form for the bubble of {schedule!r}: use one of {', '.join(BUBBLES)}, or "
            f"simulate it."
        )
    return BUBBLES[schedule](pp, times)


def held_activations(
    schedule: str, pp: int, *, until_b: float, until_w: float
) -> tuple[float, ...]:
    """Return each rank's peak of live activations, in the unit of `until_b` and `until_w`.

    `until_b` (M_B) is the memory of one microbatch from F to B, `until_w` (M_W) that from B to W.
    With r from 0, on rank r of zb_h1 r microbatches wait for W, of zb_h2 2r; the rest, up to P or
    2P - 1 in all, wait for B. Exact while M_W <= M_B, for M >= P (zb_h2: M >= 2P).

    Raises `ValueError` for another schedule than 1f1b, zb_h1 and zb_h2.

    >>> held_activations("zb_h1", 4, until_b=1.0, until_w=0.5)
    (4.0, 3.5, 3.0, 2.5)
    """
    if schedule not in _HELD:
        raise ValueError(
            f"no closed form for the memory of {schedule!r}: use one of {', '.join(_HELD)}, or "
            f"simulate it."
        )
    waiting = [_HELD[schedule](pp, rank) for rank in range(pp)]
    return tuple(for_b * until_b + for_w * until_w for for_b, for_w in waiting)


def _unsplit(pp: int, times: OpTimes) -> float:
    return (pp - 1) * (times.F + times.backward)


def _one_w_hidden(pp: int, times: OpTimes) -> float:
    return (pp - 1) * (times.F + times.B - times.W)


def _two_w_hidden(pp: int, times: OpTimes) -> float:
    return (pp - 1) * (times.F + times.B - 2 * times.W)


def _dualpipe(pp: int, times: OpTimes) -> float:
    if pp % 2:
        raise ValueError(f"dualpipe needs an even pp, got pp={pp}: use {pp + 1}.")
    return _two_streams(pp, times)


def _dualpipev(pp: int, times: OpTimes) -> float:
    return _two_streams(2 * pp, times)


def _two_streams(stages: int, times: OpTimes) -> float:
    return (stages // 2 - 1) * (times.pair + times.backward - 3 * times.W)


BUBBLES: dict[str, Callable[[int, OpTimes], float]] = {
    "gpipe": _unsplit,
    "1f1b": _unsplit,
    "interleaved_1f1b": _unsplit,
    "bfs": _unsplit,
    "zb_h1": _one_w_hidden,
    "zb_h2": _two_w_hidden,
    "interleaved_zb": _one_w_hidden,
    "dualpipe": _dualpipe,
    "dualpipev": _dualpipev,
}

# (P, rank) -> microbatches that wait for B and for W at the rank's peak.
_HELD: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "1f1b": lambda pp, rank: (pp - rank, 0),
    "zb_h1": lambda pp, rank: (pp - rank, rank),
    "zb_h2": lambda pp, rank: (2 * (pp - rank) - 1, 2 * rank),
}
