"""The fastest configurations within the memory of a device: branch and bound over a space."""

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.schedule import Placement, Schedule, ScheduleError
from jaxpipe.lab.search.bounds import (
    LeastLayout,
    ScheduleFacts,
    least_residuals,
    least_seconds,
    with_least_recomputation,
)
from jaxpipe.lab.search.space import SearchSpace
from jaxpipe.planning.cost.estimate import (
    Estimate,
    estimate,
    gain_over,
    step_seconds,
    update_seconds,
)
from jaxpipe.planning.cost.hardware import Hardware, OpSeconds, op_seconds
from jaxpipe.planning.cost.machine import machine_of
from jaxpipe.planning.cost.memory import layout_of, rank_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.limits import planned_bytes
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.resolve import RunPlan, arrange, layers_of, schedule_of
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import resolve_sizes
from jaxpipe.schedules import find_family

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout

# Position in the space: of a mesh, a shape of it, a schedule on it.
_Number = tuple[int, ...]
_OF_SHAPE = 2  # length of the number of a shape
_Bounded = tuple[float, _Number, Config]  # seconds at least
_ByGathers = dict[bool, OpSeconds]  # by whether every action gathers its layers
_ROUNDING = 1 - 1e-9  # of sums in another order


@dataclass(frozen=True, order=True)
class Found:
    """A configuration with what it needs.

    They are in order of preference: of equally fast ones the one that offloads less, then the one
    that needs less memory.

    Attributes:
      seconds: of a step, to nine digits: sums in another order are equal.
      offloaded: layers of a stage whose residuals are on the host, and 1 more for moments.
      bytes: of a device.
      number: position in the space (mesh, shape, schedule), which decides between equals.
      plan: with the seconds of ops by which it was simulated.
    """

    seconds: float
    offloaded: int
    bytes: int
    number: _Number
    plan: RunPlan

    @property
    def layout(self) -> tuple[str, str]:
        """The mesh and the schedule; one pipeline rank does the same in any."""
        parallel = self.plan.config.parallel
        return parallel.mesh, parallel.schedule if parallel.pp > 1 else ""

    def estimate(self) -> Estimate:
        """The estimate that a plan's table shows."""
        return replace(estimate(self.plan), configured=True)


@dataclass
class SearchResult:
    """The best of a search, and how much it looked at.

    Attributes:
      best: the fastest of every schedule on every mesh, the fastest first.
      shapes: meshes with a microbatch size and remat, whose time was bounded.
      candidates: schedules on shapes whose time was bounded.
      simulated: those that were simulated.
      least: the smallest memory that anything was found to need, and its configuration.
    """

    best: list[Found]
    shapes: int = 0
    candidates: int = 0
    simulated: int = 0
    least: tuple[float, Config] | None = None

    def add(self, one: Found, keep: int) -> None:
        """Add a configuration if it is the best of its layout, and remove all but `keep`."""
        for other in self.best:
            if other.layout == one.layout:
                if other < one:
                    return
                self.best.remove(other)
                break
        bisect.insort(self.best, one)
        del self.best[keep:]

    def note(self, size: float, config: Config) -> None:
        """Remember the configuration that needs least memory."""
        if self.least is None or size < self.least[0]:
            self.least = size, config


class LayoutSearch:
    """A search of a space for devices of one kind.

    Args:
      space: the configurations.
      hardware: by which ops are timed, as `plan` times them.
      memory: bytes of a device; a configuration may fill its `planned_bytes`.
      keep: number of results.
      progress: prints how many candidates are done, and the fastest of them.
    """

    def __init__(
        self, space: SearchSpace, hardware: Hardware, memory: float, keep: int = 10,
        progress: PlanProgress | None = None,
    ):  # fmt: skip
        self.space, self.hardware, self.keep = space, hardware, keep
        self._progress = progress or (lambda line: None)
        self.usable = planned_bytes(memory)
        # A run knows the device, and not these links.
        self._devices = Devices(memory=memory, hardware=machine_of(hardware.device))
        self._facts: dict[tuple[object, ...], ScheduleFacts] = {}

    def run(self) -> SearchResult:
        """Return the fastest configurations, equal to those of `every`, without simulating all.

        Best first: of shapes whose layers are traced, and of schedules on shapes, the one with the
        lowest bound is next (`bounds.least_seconds`, of a schedule with the shortest update). A
        shape is replaced by its schedules, and a schedule is built and simulated, until the lowest
        bound exceeds the time of the last result. What needs too much memory by
        `bounds.least_residuals` is left out.
        """
        result = SearchResult([])
        opened = list(self._bounded_shapes(result))
        heapq.heapify(opened)
        while opened:
            bound, number, config = heapq.heappop(opened)
            if len(result.best) == self.keep and bound > result.best[-1].seconds:
                break
            if len(number) == _OF_SHAPE:
                for one in self._bounded_schedules(config, number, result):
                    heapq.heappush(opened, one)
            elif self._may_run(config):
                result.simulated += 1
                if (fastest := self._fastest(config, number, result)) is not None:
                    result.add(fastest, self.keep)
            self._progress(lambda: _done(result))
        return result

    def gain(self, fastest: Found) -> str:
        """Return how many more tokens/s a result has than the configuration itself, in words."""
        config = self.space.config
        try:
            check_settings(config)
            is_for_any = config.parallel.dp == -1
            config = resolve_sizes(config, self.space.devices if is_for_any else None)
            seconds = op_seconds(config, self.hardware)
            own = estimate(replace(arrange(config, self._devices), seconds=seconds))
        except ValueError as error:
            return f"the configuration itself is not possible ({str(error).rstrip('.')})"
        name = f"{config.parallel.mesh} {own.label}"
        return gain_over(own, fastest.estimate(), self.usable, name)

    def every(self) -> Iterator[Found]:
        """Yield the fastest of every schedule on every shape, without any bound (slow)."""
        result = SearchResult([])
        for of_mesh, mesh in enumerate(self.space.meshes()):
            for of_shape, shape in enumerate(self.space.shapes(mesh)):
                for last, scheduled in enumerate(self.space.schedules(shape)):
                    number = of_mesh, of_shape, last
                    if (fastest := self._fastest(scheduled, number, result)) is not None:
                        yield fastest

    def _bounded_shapes(self, result: SearchResult) -> Iterator[_Bounded]:
        """Yield the shapes that some schedule has, with lower bounds on their seconds."""
        for of_mesh, mesh in enumerate(self.space.meshes()):
            for of_shape, shape in enumerate(self.space.shapes(mesh)):
                result.shapes += 1
                self._progress(lambda: f"search: bounds of {result.shapes:,} shapes")
                bound = self._least_seconds_of_shape(shape)
                if bound is not None:
                    yield bound, (of_mesh, of_shape), shape

    def _least_seconds_of_shape(self, shape: Config) -> float | None:
        """A lower bound on the seconds of a shape under any schedule; None: it has none.

        Copies with the host add to them, and so does sharing of embedding and head.
        """
        layers, parallel = shape.model.pipeline_layers, shape.parallel
        recomputed = layers * any(self.space.recomputed(shape, layers))
        train = structs.replace(shape.train, offload_layers=0, remat_layers=recomputed)
        parallel = structs.replace(parallel, vocab_parallel_pp=False)
        alone = structs.replace(shape, parallel=parallel, train=train)
        seconds = {
            reshards: with_least_recomputation(each, layers)
            for reshards, each in self._least_seconds_of(alone).items()
        }
        bounds = {}
        for scheduled in self.space.orders(shape):
            try:
                facts, layers = self._arranged(scheduled)
            except ScheduleError as error:
                self.space.refusals[str(error)] = None
                continue
            key = facts.placement, facts.is_split, layers
            if key not in bounds or scheduled.parallel.memory_limit:
                layout = layout_of(scheduled, facts.placement, layers)
                updates = self._updates(scheduled, layout, seconds)
                bounds[key] = self._least_step(scheduled, facts, layers, seconds, updates)
        return min(bounds.values(), default=None)

    def _updates(
        self, scheduled: Config, layout: "StageLayout", seconds: _ByGathers
    ) -> Iterator[tuple[Config, float]]:
        """Yield every way to store the state, with the seconds of its update."""
        for one in self.space.storages(scheduled):
            yield one, update_seconds(one, layout, seconds[one.parallel.reshards])

    def _arranged(self, scheduled: Config) -> tuple[ScheduleFacts, tuple[int, ...]]:
        """What is known of a schedule before it is built, and the layers of its stages."""
        parallel, family = scheduled.parallel, find_family(scheduled.parallel.schedule)
        forwards = scheduled.scheduled_microbatches
        if family.placement == "file":
            facts = self._facts_of(scheduled)
        else:
            placement = family.place_stages(parallel.pp, parallel.virtual_stages, forwards)
            facts = ScheduleFacts(placement, forwards, family.splits)
        return facts, layers_of(scheduled, facts.placement, self._devices)

    def _least_step(
        self, scheduled: Config, facts: ScheduleFacts, layers: tuple[int, ...],
        seconds: _ByGathers, updates: Iterable[tuple[Config, float]],
    ) -> float:  # fmt: skip
        """A lower bound on the seconds of a step with one of these ways to store the state."""
        parallel = scheduled.parallel
        if parallel.layer_split == "balanced" and parallel.memory_limit:
            return 0.0  # the limit may ask for other layers
        least: dict[bool, float] = {}
        for one, update in updates:
            gathers = one.parallel.reshards
            least[gathers] = min(update, least.get(gathers, math.inf))
        steps = []
        for gathers, update in least.items():
            costs = seconds[gathers].costs(
                layers, shared_by=parallel.vocab_shared_by, split=facts.is_split,
                recomputes=scheduled.train.remat == "ahead",
            )  # fmt: skip
            steps.append(least_seconds(facts, costs) + update)
        return min(steps) * _ROUNDING

    def _may_fit(self, shape: Config, result: SearchResult) -> bool:
        layout, sizes = LeastLayout.of(shape), []
        for one in self.space.storages(shape):
            sizes.append(rank_bytes(one, layout, None).total)
            result.note(sizes[-1], one)
        return min(sizes) <= self.usable

    def _bounded_schedules(
        self, shape: Config, number: _Number, result: SearchResult
    ) -> Iterator[_Bounded]:
        """Yield the schedules of a shape that may fit, with lower bounds on their seconds."""
        if not self._may_fit(shape, result):
            return
        timed: dict[tuple[int, int], _ByGathers] = {}
        # Every way to store the state, with its bytes, and the seconds of its update.
        states: dict[tuple[Placement, tuple[int, ...]], list[tuple[int, Config, float]]] = {}
        for last, scheduled in enumerate(self.space.schedules(shape)):
            result.candidates += 1
            some = scheduled.train.offload_layers, scheduled.train.remat_layers
            try:
                facts, layers = self._arranged(scheduled)
            except ScheduleError:  # the bound of the shape has noted it
                continue
            if some not in timed:
                timed[some] = self._least_seconds_of(scheduled)
            key = facts.placement, layers
            layout = layout_of(scheduled, facts.placement, layers)
            if key not in states:
                states[key] = [
                    (rank_bytes(one, layout, None).total, one, update)
                    for one, update in self._updates(scheduled, layout, timed[some])
                ]
            left = self.usable - least_residuals(scheduled, facts, layout)
            if fitting := [state[1:] for state in states[key] if state[0] <= left]:
                bound = self._least_step(scheduled, facts, layers, timed[some], fitting)
                yield bound, (*number, last), scheduled

    def _may_run(self, scheduled: Config) -> bool:
        """Whether a schedule can be built, and its order leaves enough memory for some state."""
        try:
            facts = self._facts_of(scheduled)
        except ScheduleError as error:
            self.space.refusals[str(error)] = None
            return False
        layout = layout_of(scheduled, facts.placement, self._arranged(scheduled)[1])
        left = self.usable - least_residuals(scheduled, facts, layout)
        ways = self.space.storages(scheduled)
        return any(rank_bytes(one, layout, None).total <= left for one in ways)

    def _least_seconds_of(self, scheduled: Config) -> _ByGathers:
        """The least seconds of ops of a schedule, without and with gathers in every action.

        Layers may run in halves, which are not traced for it.
        """
        ways = {one.parallel.reshards: one for one in self.space.storages(scheduled)}
        return {
            gathers: op_seconds(one, self.hardware).least_in_halves for gathers, one in ways.items()
        }

    def _facts_of(self, config: Config) -> ScheduleFacts:
        """The facts of a configuration's schedule; raises `ScheduleError` if there is none."""
        parallel, family = config.parallel, find_family(config.parallel.schedule)
        if family.is_searched:  # for costs and a limit, by which all of it may change
            return self._arranged(config)[0]
        key = (
            family.name, parallel.pp, config.scheduled_microbatches, parallel.slices,
            parallel.virtual_stages, parallel.breadth, parallel.in_flight, parallel.schedule_file,
        )  # fmt: skip
        if key not in self._facts:
            schedule: Schedule = schedule_of(config)
            in_order = not parallel.in_flight
            self._facts[key] = ScheduleFacts.of_schedule(schedule, in_order=in_order)
        return self._facts[key]

    def _fastest(self, scheduled: Config, number: _Number, result: SearchResult) -> Found | None:
        """The fastest way to run layers and store the state within the memory; None: there is none.

        ZeRO stages have the same scan, unless every action gathers its layers.
        """
        timed: dict[object, tuple[RunPlan, float]] = {}
        fitting = []
        for one in chain.from_iterable(map(self.space.storages, self.space.halves(scheduled))):
            # Under "auto" the schedule depends on the memory that the state leaves.
            parallel = one.parallel
            key = parallel.reshards, parallel.overlap_halves
            key = one if parallel.memory_limit == "auto" else key
            if not self.space.is_legal(one):
                continue
            try:
                if key not in timed:
                    seconds = op_seconds(one, self.hardware)
                    plan = replace(arrange(one, self._devices), seconds=seconds)
                    timed[key] = plan, step_seconds(plan)
            except ScheduleError as error:
                self.space.refusals[str(error)] = None
                continue
            plan, scan = timed[key]
            if parallel.overlap_halves and plan.buffers.pairs:
                continue  # F hides its collectives behind a gradient
            config = self.space.stored_as(plan.config, one)
            size = rank_bytes(config, plan.layout, plan.buffers).total
            result.note(size, config)
            if size <= self.usable:
                seconds = float(f"{scan + update_seconds(config, plan.layout, plan.seconds):.9g}")
                away = config.train.offload_layers + config.train.offload_moments
                stored = replace(plan, config=config)
                fitting.append(Found(seconds, away, size, number, stored))
        best = min(fitting, key=lambda one: (one.seconds, one.offloaded, one.bytes), default=None)
        plan = best and self.space.with_loop(best.plan)
        return replace(best, plan=plan) if best and plan else None


def _done(result: SearchResult) -> str:
    fastest = ""
    if result.best:
        config, seconds = result.best[0].plan.config, result.best[0].seconds
        fastest = f", fastest so far {config.parallel.mesh} {config.parallel.schedule}"
        fastest += f", {config.tokens_per_step / seconds:,.0f} tokens/s"
    return f"search: {result.simulated:,} of {result.candidates:,} candidates simulated{fastest}"
