"""The fastest configurations within the memory of a device: branch and bound over a space."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.schedule import Placement, Schedule, ScheduleError
from jaxpipe.lab.search.bounds import LeastLayout, ScheduleFacts, least_residuals, least_seconds
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

# bytes and seconds of every way to store the state, by microbatch size, placement and layers
_States = dict[tuple[int, Placement, tuple[int, ...]], list[tuple[int, float]]]
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
      number: position in the space, which decides between equals.
      plan: with the seconds of ops by which it was simulated.
    """

    seconds: float
    offloaded: int
    bytes: int
    number: int
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
      candidates: configurations of the space whose time was bounded.
      simulated: those whose schedule was simulated.
      least: the smallest memory that anything was found to need, and its configuration.
    """

    best: list[Found]
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

        Candidates are simulated in the order of their lower bounds (`bounds.least_seconds`, with
        the shortest update), until that of the next exceeds the time of the last result. Those that
        need too much memory by `bounds.least_residuals` are left out.
        """
        result = SearchResult([])
        for bound, number, scheduled in sorted(self._bounded(result), key=lambda one: one[:2]):
            if len(result.best) == self.keep and bound > result.best[-1].seconds:
                break
            result.simulated += 1
            if (fastest := self._fastest(scheduled, number, result)) is not None:
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
        schedules = (
            scheduled
            for mesh in self.space.meshes()
            for shape in self.space.shapes(mesh)
            for scheduled in self.space.schedules(shape)
        )
        for number, scheduled in enumerate(schedules):
            if (fastest := self._fastest(scheduled, number, result)) is not None:
                yield fastest

    def _bounded(self, result: SearchResult) -> Iterator[tuple[float, int, Config]]:
        """Yield candidates that may fit, with a lower bound on their seconds and their number.

        The state of a mesh is least with the smallest microbatches, and no remat changes it: where
        that does not fit, no other shape of the mesh does.
        """
        numbers = count()
        for mesh in self.space.meshes():
            states: _States = {}
            for shape in self.space.shapes(mesh):
                if not self._may_fit(shape, result):
                    break
                yield from self._bounded_schedules(shape, states, result, numbers)

    def _may_fit(self, shape: Config, result: SearchResult) -> bool:
        layout, sizes = LeastLayout.of(shape), []
        for one in self.space.storages(shape):
            sizes.append(rank_bytes(one, layout, None).total)
            result.note(sizes[-1], one)
        return min(sizes) <= self.usable

    def _bounded_schedules(
        self, shape: Config, states: _States, result: SearchResult, numbers: Iterator[int]
    ) -> Iterator[tuple[float, int, Config]]:
        timed: dict[tuple[int, int], OpSeconds] = {}
        for scheduled in self.space.schedules(shape):
            number, train = next(numbers), scheduled.train
            some = train.offload_layers, train.remat_layers
            result.candidates += 1
            self._progress(lambda: f"search: bounds of {result.candidates:,} candidates")
            try:
                facts = self._facts_of(scheduled)
                layers = layers_of(scheduled, facts.placement, self._devices)
            except ScheduleError as error:
                self.space.refusals[str(error)] = None
                continue
            if some not in timed:
                timed[some] = self._least_seconds_of(scheduled)
            seconds, layout = timed[some], layout_of(scheduled, facts.placement, layers)
            key = shape.train.microbatch_size, facts.placement, layers
            if key not in states:
                states[key] = [
                    (rank_bytes(one, layout, None).total, update_seconds(one, layout, seconds))
                    for one in self.space.storages(scheduled)
                ]
            stored = least_residuals(scheduled, facts, layout)
            fitting = [update for size, update in states[key] if size + stored <= self.usable]
            if fitting:
                costs = seconds.costs(
                    layers, shared_by=shape.parallel.vocab_shared_by, split=facts.is_split,
                    recomputes=shape.train.remat == "ahead",
                )  # fmt: skip
                bound = least_seconds(facts, costs) + min(fitting)
                if shape.parallel.layer_split == "balanced" and scheduled.parallel.memory_limit:
                    bound = 0.0  # the limit may ask for other layers
                yield bound * _ROUNDING, number, scheduled

    def _least_seconds_of(self, scheduled: Config) -> OpSeconds:
        """The least seconds of ops of a schedule: without gathers in every action, and in halves.

        Layers in halves are not traced for it.
        """
        parallel = structs.replace(scheduled.parallel, zero_stage=0)
        seconds = op_seconds(structs.replace(scheduled, parallel=parallel), self.hardware)
        return seconds.least_in_halves

    def _facts_of(self, config: Config) -> ScheduleFacts:
        """The facts of a configuration's schedule; raises `ScheduleError` if there is none."""
        parallel, family = config.parallel, find_family(config.parallel.schedule)
        forwards = config.scheduled_microbatches
        key = (
            family.name, parallel.pp, forwards, parallel.slices, parallel.virtual_stages,
            parallel.breadth, parallel.in_flight, parallel.schedule_file,
        )  # fmt: skip
        if key not in self._facts:
            if family.is_searched:
                placement = family.place_stages(parallel.pp)
                self._facts[key] = ScheduleFacts.of_search(placement, forwards)
            else:
                schedule: Schedule = schedule_of(config)
                in_order = not parallel.in_flight
                self._facts[key] = ScheduleFacts.of_schedule(schedule, in_order=in_order)
        return self._facts[key]

    def _fastest(self, scheduled: Config, number: int, result: SearchResult) -> Found | None:
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
