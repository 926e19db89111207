"""The fastest configurations within the memory of a device: branch and bound over a space."""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.lab.search.bounded_space import Bounded, BoundedSpace
from jaxpipe.lab.search.result import Found, Number, SearchResult
from jaxpipe.lab.search.space import SearchSpace
from jaxpipe.planning.cost.estimate import estimate, gain_over, step_seconds, update_seconds
from jaxpipe.planning.cost.hardware import Hardware, op_seconds, rates_of_replicas
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.limits import planned_bytes
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.resolve import RunPlan, arrange
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import resolve_sizes

_OF_SHAPE = 2  # length of the number of a shape


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
        self._devices = Devices(memory=memory, hardware=hardware.usual)
        self._bounded = BoundedSpace(space, hardware, self._devices, self.usable)

    def run(self) -> SearchResult:
        """Return the fastest configurations, equal to those of `every`, without simulating all.

        Best first: of shapes whose layers are traced, and of schedules on shapes, the one with the
        lowest bound is next (`bounds.least_seconds`, of a schedule with the shortest update). A
        shape is replaced by its schedules, and a schedule is built and simulated, until the lowest
        bound exceeds the time of the last result. What needs too much memory by
        `bounds.least_residuals` is left out.
        """
        result = SearchResult([])
        opened: list[Bounded] = []
        for one in self._bounded.shapes():
            heapq.heappush(opened, one)
            self._progress(lambda: f"search: bounds of {len(opened):,} shapes")
        while opened:
            bound, number, config = heapq.heappop(opened)
            if len(result.best) == self.keep and bound > result.best[-1].seconds:
                break
            if len(number) == _OF_SHAPE:
                for one in self._bounded.schedules(config, number, result):
                    result.candidates += 1
                    heapq.heappush(opened, one)
            elif self._bounded.may_run(config):
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

    def _fastest(self, scheduled: Config, number: Number, result: SearchResult) -> Found | None:
        """The fastest way to run layers and store the state within the memory; None: there is none.

        ZeRO stages and groups have the same scan, unless every action gathers its layers.
        """
        timed: dict[object, tuple[RunPlan, float]] = {}
        fitting = []
        for one in chain.from_iterable(map(self.space.storages, self.space.halves(scheduled))):
            # Under "auto" the schedule depends on the memory that the state leaves.
            parallel = one.parallel
            groups = parallel.dp_replicate if parallel.reshards else 0
            way = parallel.reshards, parallel.overlap_halves, groups
            key = one if parallel.memory_limit == "auto" else way
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
            rates = rates_of_replicas(one, self.hardware)
            plan = replace(plan, seconds=structs.replace(plan.seconds, **rates))
            if parallel.overlap_halves and plan.buffers.pairs:
                continue  # F hides its collectives behind a gradient
            config = self.space.stored_as(plan.config, one)
            size = rank_bytes(config, plan.layout, plan.buffers).total
            result.note(size, config)
            if size <= self.usable:
                total = float(f"{scan + update_seconds(config, plan.layout, plan.seconds):.9g}")
                away = config.train.offload_layers + config.train.offload_moments
                stored = replace(plan, config=config)
                fitting.append(Found(total, away, size, number, stored))
        best = min(fitting, key=lambda one: (one.seconds, one.offloaded, one.bytes), default=None)
        looped = best and self.space.with_loop(best.plan)
        return replace(best, plan=looped) if best and looped else None


def _done(result: SearchResult) -> str:
    fastest = ""
    if result.best:
        config, seconds = result.best[0].plan.config, result.best[0].seconds
        fastest = f", fastest so far {config.parallel.mesh} {config.parallel.schedule}"
        fastest += f", {config.tokens_per_step / seconds:,.0f} tokens/s"
    return f"search: {result.simulated:,} of {result.candidates:,} candidates simulated{fastest}"
