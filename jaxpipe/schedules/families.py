"""The registry of schedule families, with one record per family.

To add a schedule, write its builder, name it in `ORDERS` of the core, and add an entry to
`FAMILIES`: `build`, the configuration's checks and the plan read this entry, and the tests of all
schedules read both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxpipe.core.schedule.action import Placement, Schedule, ScheduleError
from jaxpipe.core.schedule.orders import ORDERS
from jaxpipe.core.schedule.orders.custom import build_custom
from jaxpipe.schedules.search.automatic import zb_auto
from jaxpipe.schedules.search.target import Target
from jaxpipe.schedules.search.vshape import search_v_shape


class ScheduleVariant(NamedTuple):
    """A family with values for its options; None keeps the family's default.

    >>> ScheduleVariant("interleaved_1f1b", virtual_stages=2).label
    'interleaved_1f1b v=2'
    """

    family: str
    virtual_stages: int | None = None
    memory_limit: str | float | None = None
    in_flight: int | None = None  # as in `Lockstep`
    breadth: int | None = None

    @property
    def label(self) -> str:
        """The name of the variant in tables."""
        choices = {
            "v=": self.virtual_stages, "breadth=": self.breadth, "": self.memory_limit,
            "in_flight=": self.in_flight,
        }  # fmt: skip
        options = (f" {name}{choice}" for name, choice in choices.items() if choice is not None)
        return self.family + "".join(options)


class VariantSizes(NamedTuple):
    """The sizes that decide which variants of a family a plan tries.

    Attributes:
      pp: number of pipeline ranks.
      layers: layers of the model.
      slices: sequence slices per sequence.
      vocab_parallel: whether embedding and head are vocabulary-parallel over pp.
    """

    pp: int
    layers: int
    slices: int = 1
    vocab_parallel: bool = False

    @property
    def packed_in_flight(self) -> int:
        """Microbatches in flight with which 1F1B runs an F and a BW in every steady tick."""
        return 2 * self.pp - 1 + self.vocab_parallel + self.slices - 1


def _default_only(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    return [ScheduleVariant(name)]


def _with_limits_in_flight(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    """Return the variant in order, the packed one, and one with a limit halfway between."""
    less = sizes.slices - 1  # the part of the limits that is due to slices
    ahead = {(3 * sizes.pp - 1) // 2, sizes.packed_in_flight - less} - {sizes.pp - 1, sizes.pp}
    return [
        ScheduleVariant(name),
        *(ScheduleVariant(name, in_flight=n + less) for n in sorted(ahead)),
    ]


def _with_limit_of_same_memory(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    """Return the variant in order, and one whose forwards run ahead within the same memory."""
    in_flight = sizes.pp + 1 if name == "dualpipe" else 2 * sizes.pp
    return [ScheduleVariant(name), ScheduleVariant(name, in_flight=in_flight)]


def _with_virtual_stages(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    enough = (v for v in (2, 3, 4) if sizes.layers >= sizes.pp * v)
    return [ScheduleVariant(name, virtual_stages=v) for v in enough]


def _with_memory_limits(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    return [ScheduleVariant(name, memory_limit=limit) for limit in ("1p", "2p")]


def _no_variants(name: str, sizes: VariantSizes) -> Iterable[ScheduleVariant]:
    return []


_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_SLICES = {"slices": 1}
_OF_SEARCH = {one.name for one in fields(Target)}


def _stages(default: int) -> Mapping[str, Any]:
    """The options of a family over several stages per rank."""
    return {"virtual_stages": default, "breadth": None} | _SLICES


@dataclass(frozen=True)
class ScheduleFamily:
    """A family of schedules: its builder, its constraints and its variants.

    Attributes:
      name: the name in `build` and in the configuration.
      builder: `(pp, microbatches, **options) -> Schedule`.
      summary: one line that helps to choose a family.
      options: the options of the builder, with their defaults.
      placement: "loop": stage s on rank s mod pp. "v": down the ranks and up again. "both ways":
        microbatches enter at the first and at the last rank. "file": read from a file.
      needs_equal_rounds: whether microbatches are divided into rounds of equal length, at least pp
        where there are that many microbatches.
      is_searched: whether the order comes from a search for given costs of the ops; the builder
        then takes a `target` (`Target`).
      splits: whether some gradient is B and W, and not BW; of a file it is not known.
      may_underfill: whether fewer microbatches than ranks are acceptable, or the builder has a
        larger least number.
      variants: `(name, sizes) -> variants` that a plan tries.
      elsewhere: names in PyTorch and in papers, in the spelling of `_plain`.
    """

    name: str
    builder: Callable[..., Schedule]
    summary: str
    options: Mapping[str, Any] = field(default_factory=lambda: _NO_OPTIONS)  # not hashable in 3.11
    placement: str = "loop"
    needs_equal_rounds: bool = False
    is_searched: bool = False
    splits: bool = False
    may_underfill: bool = False
    variants: Callable[[str, VariantSizes], Iterable[ScheduleVariant]] = _default_only
    elsewhere: tuple[str, ...] = ()

    def has_option(self, option: str) -> bool:
        """Return whether `build` takes an option for it, such as `slices` or `virtual_stages`."""
        return option in self.options or (self.is_searched and option in _OF_SEARCH)

    def place_stages(self, pp: int, virtual_stages: int = 0, microbatches: int = 2) -> Placement:
        """Return the placement of a schedule's stages, which no order decides, but one in a file.

        Args:
          pp: number of pipeline ranks.
          virtual_stages: stages of a rank; 0: the default.
          microbatches: of a step, of which half enter at the last rank if "both ways".
        """
        if self.placement == "v":
            return Placement.v_shape(pp)
        if self.placement == "both ways":
            return replace(Placement.loop(pp), mirrored_from=-(-microbatches // 2))
        return Placement.loop(pp, virtual_stages or self.stages)

    @property
    def stages(self) -> int:
        """Default number of stages per rank."""
        return self.options.get("virtual_stages") or (2 if self.placement == "v" else 1)


FAMILIES = {
    family.name: family
    for family in (
        ScheduleFamily("gpipe", ORDERS["gpipe"],
            "all forwards, then all backwards: simple, holds every microbatch",
            _SLICES, may_underfill=True, elsewhere=("afab", "fthenb")),
        ScheduleFamily("1f1b", ORDERS["1f1b"],
            "one forward, one backward in turn: holds P microbatches",
            _SLICES, variants=_with_limits_in_flight, elsewhere=("pipedream", "pipedreamflush")),
        ScheduleFamily("interleaved_1f1b", ORDERS["interleaved_1f1b"],
            "1F1B over v stages a rank: 1/v of the bubble for v times the messages",
            _stages(2), needs_equal_rounds=True, variants=_with_virtual_stages,
            elsewhere=("interleaved", "vpp", "looped1f1b")),
        ScheduleFamily("bfs", ORDERS["bfs"],
            "all microbatches through one stage of a rank after the other",
            _stages(1), may_underfill=True, variants=_with_virtual_stages,
            elsewhere=("loopedbfs", "breadthfirst")),
        ScheduleFamily("zb_h1", ORDERS["zb_h1"],
            "B and W apart, W fills the drain: a third of 1F1B's bubble",
            _SLICES, splits=True, elsewhere=("zerobubble", "zb1p", "zb")),
        ScheduleFamily("zb_h2", ORDERS["zb_h2"], "B and W apart, no bubble for twice 1F1B's memory",
            _SLICES, splits=True, elsewhere=("zb2p",)),
        ScheduleFamily("zb_auto", zb_auto,
            "searched for the costs of the ops within a memory limit",
            is_searched=True, splits=True, variants=_with_memory_limits),
        ScheduleFamily("interleaved_zb", ORDERS["interleaved_zb"], "zb_h1 over v stages a rank",
            _stages(2), splits=True, needs_equal_rounds=True, variants=_with_virtual_stages,
            elsewhere=("interleavedzerobubble",)),
        ScheduleFamily("zbv", partial(search_v_shape, "zbv"),
            "searched on the V: no bubble at 1F1B's memory", placement="v", is_searched=True,
            splits=True, elsewhere=("zbvzerobubble", "zerobubblev")),
        ScheduleFamily("v_half", partial(search_v_shape, "v_half"),
            "searched on the V: half of 1F1B's memory", placement="v", is_searched=True,
            splits=True),
        ScheduleFamily("v_min", partial(search_v_shape, "v_min"),
            "searched on the V: a third of 1F1B's memory", placement="v", is_searched=True,
            splits=True),
        ScheduleFamily("1f1b_v", ORDERS["1f1b_v"],
            "1F1B on the V: two thirds of its memory, nothing split", placement="v"),
        ScheduleFamily("dualpipe", ORDERS["dualpipe"],
            "microbatches from both ends, F beside BW: two copies of the parameters",
            placement="both ways", splits=True, may_underfill=True,
            variants=_with_limit_of_same_memory),
        ScheduleFamily("dualpipev", ORDERS["dualpipev"],
            "DualPipe folded into a V: one copy of the parameters",
            placement="v", splits=True, may_underfill=True, variants=_with_limit_of_same_memory),
        ScheduleFamily("custom", build_custom, "the orders in a file",
            {"path": None} | _SLICES, placement="file", may_underfill=True, variants=_no_variants,
            elsewhere=("pipelineschedulemulti", "pipelineschedulesingle")),
    )
}  # fmt: skip
NAMES = tuple(FAMILIES)
BUILDERS = {name: f.builder for name, f in FAMILIES.items() if f.placement != "file"}


def find_family(name: str) -> ScheduleFamily:
    """Return the family of a name, ignoring case; raise `ScheduleError` for an unknown one."""
    if name.lower() not in FAMILIES:
        plain = _plain(name)
        same = [f.name for f in FAMILIES.values() if plain in (_plain(f.name), *f.elsewhere)]
        near = same or get_close_matches(name.lower(), NAMES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ScheduleError(f"unknown schedule {name!r}: {meant}Choose one of {', '.join(NAMES)}.")
    return FAMILIES[name.lower()]


def _plain(name: str) -> str:
    """A name's letters and digits alone, without `Schedule` in front: PyTorch's class names."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("schedule")
