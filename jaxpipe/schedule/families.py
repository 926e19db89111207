"""The families of schedules: one record each, which says all that others ask about it.

To add a schedule, write its builder, and an entry here: `build`, the configuration's checks, the
plan and the tests of every schedule follow from it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from jaxpipe.schedule.action import Placement, Schedule, ScheduleError
from jaxpipe.schedule.automatic import zb_auto
from jaxpipe.schedule.custom import custom
from jaxpipe.schedule.dualpipe import dualpipe, dualpipev
from jaxpipe.schedule.loop import (
    bfs,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from jaxpipe.schedule.problem import Target
from jaxpipe.schedule.vshape import one_f_one_b_v, v_shaped


class Variant(NamedTuple):
    """A family with its open choices made; None leaves one as the family has it.

    >>> Variant("interleaved_1f1b", virtual_stages=2).label
    'interleaved_1f1b v=2'
    """

    family: str
    virtual_stages: int | None = None
    memory_limit: str | float | None = None
    in_flight: int | None = None  # as in `Lockstep`
    breadth: int | None = None

    @property
    def label(self) -> str:
        """Its name in tables."""
        choices = {
            "v=": self.virtual_stages, "breadth=": self.breadth, "": self.memory_limit,
            "in_flight=": self.in_flight,
        }  # fmt: skip
        said = (f" {name}{choice}" for name, choice in choices.items() if choice is not None)
        return self.family + "".join(said)


class Sizes(NamedTuple):
    """What decides which variants of a family are worth a try.

    Ranks, layers of the model, slices of a sequence, and whether all ranks share the vocabulary.
    """

    pp: int
    layers: int
    slices: int = 1
    vocab_parallel: bool = False

    @property
    def packed(self) -> int:
        """As many microbatches in flight as let 1F1B do an F and a BW in every steady tick."""
        return 2 * self.pp - 1 + self.vocab_parallel + self.slices - 1


def _as_it_is(name: str, sizes: Sizes) -> Iterable[Variant]:
    return [Variant(name)]


def _running_ahead(name: str, sizes: Sizes) -> Iterable[Variant]:
    """In order, packed, and half-way between."""
    less = sizes.slices - 1  # of what follows is for the slices
    ahead = {(3 * sizes.pp - 1) // 2, sizes.packed - less} - {sizes.pp - 1, sizes.pp}
    return [Variant(name), *(Variant(name, in_flight=n + less) for n in sorted(ahead))]


def _beside_or_ahead(name: str, sizes: Sizes) -> Iterable[Variant]:
    """In order, and with forwards that run ahead in cells of their own, within its own memory."""
    held = sizes.pp + 1 if name == "dualpipe" else 2 * sizes.pp
    return [Variant(name), Variant(name, in_flight=held)]


def _in_chunks(name: str, sizes: Sizes) -> Iterable[Variant]:
    enough = (v for v in (2, 3, 4) if sizes.layers >= sizes.pp * v)
    return [Variant(name, virtual_stages=v) for v in enough]


def _within_limits(name: str, sizes: Sizes) -> Iterable[Variant]:
    return [Variant(name, memory_limit=limit) for limit in ("1p", "2p")]


def _of_no_size(name: str, sizes: Sizes) -> Iterable[Variant]:
    return []


@dataclass(frozen=True)
class Family:
    """What is known of a family of schedules before one is built.

    Attributes:
      name: as in `build` and in the configuration.
      builder: `(pp, microbatches, **options) -> Schedule`.
      summary: one line for people who choose.
      placement: "loop": stage s on rank s mod pp. "v": down the ranks and up again. "both ways":
        microbatches enter at both ends. "file": as a file has it.
      least_rounds: at least so many microbatches for each rank; 0: one microbatch is enough.
      even: pp and the number of microbatches must be even.
      in_rounds: microbatches come in rounds of one length, at least pp where there are so many.
      underfills: fewer microbatches than ranks are no mistake.
      variants: `(name, sizes) -> variants` that a plan tries.
    """

    name: str
    builder: Callable[..., Schedule]
    summary: str
    placement: str = "loop"
    least_rounds: int = 0
    even: bool = False
    in_rounds: bool = False
    underfills: bool = False
    variants: Callable[[str, Sizes], Iterable[Variant]] = _as_it_is

    def takes(self, option: str) -> bool:
        """Whether its builder has an option, such as `slices` or `virtual_stages`."""
        of_search = {field.name for field in fields(Target)} if self.searched else set()
        return option in of_search | {*signature(self.builder).parameters}

    @property
    def searched(self) -> bool:
        """Whether its order is searched for the costs of the ops."""
        return "target" in signature(self.builder).parameters

    def default(self, option: str) -> Any:
        """What an option of its builder is where it is not given; None for one that it has not."""
        parameter = signature(self.builder).parameters.get(option)
        return parameter and parameter.default

    def placed(self, pp: int) -> Placement:
        """Where the stages of a searched one live."""
        return Placement.v_shape(pp) if self.placement == "v" else Placement.loop(pp)

    @property
    def stages(self) -> int:
        """Stages that a rank holds where nothing else is asked for."""
        return self.default("virtual_stages") or (2 if self.placement == "v" else 1)

    def nearest(self, pp: int, microbatches: int) -> tuple[int, int]:
        """The sizes nearest to these that it can have.

        >>> FAMILIES["dualpipe"].nearest(3, 5), FAMILIES["interleaved_1f1b"].nearest(2, 5)
        ((4, 8), (2, 4))
        """
        if self.even:
            pp, microbatches = pp + pp % 2, microbatches + microbatches % 2
        microbatches = max(microbatches, self.least_rounds * pp)
        if self.in_rounds:
            rounds = max(1, microbatches // pp)
            microbatches = microbatches // rounds * rounds
        return pp, microbatches

    def least(self, pp: int) -> int:
        """The fewest microbatches that it can have on so many ranks."""
        return self.nearest(pp, 1)[1]


FAMILIES = {
    family.name: family
    for family in (
        Family("gpipe", gpipe, "all forwards, then all backwards: simple, holds every microbatch",
               underfills=True),
        Family("1f1b", one_f_one_b, "one forward, one backward in turn: holds P microbatches",
               variants=_running_ahead),
        Family("interleaved_1f1b", interleaved_1f1b,
               "1F1B over v stages a rank: 1/v of the bubble for v times the messages",
               in_rounds=True, variants=_in_chunks),
        Family("bfs", bfs, "all microbatches through one stage of a rank after the other",
               underfills=True, variants=_in_chunks),
        Family("zb_h1", zb_h1, "B and W apart, W fills the drain: a third of 1F1B's bubble"),
        Family("zb_h2", zb_h2, "B and W apart, no bubble for twice 1F1B's memory"),
        Family("zb_auto", zb_auto, "searched for the costs of the ops within a memory limit",
               variants=_within_limits),
        Family("interleaved_zb", interleaved_zb, "zb_h1 over v stages a rank",
               in_rounds=True, variants=_in_chunks),
        Family("zbv", partial(v_shaped, "zbv"), "searched on the V: no bubble at 1F1B's memory",
               "v"),
        Family("v_half", partial(v_shaped, "v_half"), "searched on the V: half of 1F1B's memory",
               "v"),
        Family("v_min", partial(v_shaped, "v_min"), "searched on the V: a third of 1F1B's memory",
               "v"),
        Family("1f1b_v", one_f_one_b_v, "1F1B on the V: two thirds of its memory, nothing split",
               "v"),
        Family("dualpipe", dualpipe,
               "microbatches from both ends, F beside BW: two copies of the parameters",
               "both ways", least_rounds=2, even=True, variants=_beside_or_ahead),
        Family("dualpipev", dualpipev, "DualPipe folded into a V: one copy of the parameters",
               "v", least_rounds=2, variants=_beside_or_ahead),
        Family("custom", custom, "the orders in a file", "file", underfills=True,
               variants=_of_no_size),
    )
}  # fmt: skip
NAMES = tuple(FAMILIES)
BUILDERS = {name: f.builder for name, f in FAMILIES.items() if f.placement != "file"}


def family_of(name: str) -> Family:
    """The family of that name, in any case; raises `ScheduleError` where there is none."""
    if name.lower() not in FAMILIES:
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}.")
    return FAMILIES[name.lower()]
