"""The shapes of a space, and schedules on them, with lower bounds on their seconds and bytes."""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.schedule import Placement, Schedule, ScheduleError
from jaxpipe.lab.search.bounds import (
    ScheduleFacts,
    least_layout,
    least_residuals,
    least_seconds,
    with_least_recomputation,
)
from jaxpipe.lab.search.result import Number, SearchResult
from jaxpipe.lab.search.space import SearchSpace
from jaxpipe.planning.cost.estimate import update_seconds
from jaxpipe.planning.cost.hardware import (
    Hardware,
    OpSeconds,
    op_seconds,
    rates_of_replicas,
)
from jaxpipe.planning.cost.memory import layout_of, rank_bytes
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.resolve import layers_of, schedule_of
from jaxpipe.schedules import find_family

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout

Bounded = tuple[float, Number, Config]  # seconds at least
_ByStorage = dict[tuple[bool, int], OpSeconds]  # by `_storage`
_ROUNDING = 1 - 1e-9  # of sums in another order


class BoundedSpace:
    """The candidates of a space that may fit, with lower bounds on their seconds.

    Args:
      space: the configurations.
      hardware: by which ops are timed.
      devices: of a run.
      usable: bytes that a configuration may fill of a device.
    """

    def __init__(self, space: SearchSpace, hardware: Hardware, devices: Devices, usable: float):
        self.space, self.hardware, self.usable = space, hardware, usable
        self._devices = devices
        self._facts: dict[tuple[object, ...], ScheduleFacts] = {}

    def shapes(self) -> Iterator[Bounded]:
        """Yield the shapes that some schedule has, with lower bounds on their seconds."""
        for of_mesh, mesh in enumerate(self.space.meshes()):
            for of_shape, shape in enumerate(self.space.shapes(mesh)):
                bound = self._least_seconds_of_shape(shape)
                if bound is not None:
                    yield bound, (of_mesh, of_shape), shape

    def schedules(self, shape: Config, number: Number, result: SearchResult) -> Iterator[Bounded]:
        """Yield the schedules of a shape that may fit, with lower bounds on their seconds."""
        if not self._may_fit(shape, result):
            return
        timed: dict[tuple[int, int], _ByStorage] = {}
        # Every way to store the state, with its bytes, and the seconds of its update.
        states: dict[tuple[Placement, tuple[int, ...]], list[tuple[int, Config, float]]] = {}
        for last, scheduled in enumerate(self.space.schedules(shape)):
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

    def may_run(self, scheduled: Config) -> bool:
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
            way: with_least_recomputation(each, layers)
            for way, each in self._least_seconds_of(alone).items()
        }
        bounds = {}
        for scheduled in self.space.orders(shape):
            try:
                facts, split = self._arranged(scheduled)
            except ScheduleError as error:
                self.space.refusals[str(error)] = None
                continue
            key = facts.placement, facts.is_split, split
            if key not in bounds or scheduled.parallel.memory_limit:
                layout = layout_of(scheduled, facts.placement, split)
                updates = self._updates(scheduled, layout, seconds)
                bounds[key] = self._least_step(scheduled, facts, split, seconds, updates)
        return min(bounds.values(), default=None)

    def _updates(
        self, scheduled: Config, layout: "StageLayout", seconds: _ByStorage
    ) -> Iterator[tuple[Config, float]]:
        """Yield every way to store the state, with the seconds of its update."""
        for one in self.space.storages(scheduled):
            yield one, update_seconds(one, layout, seconds[_storage(one)])

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
        seconds: _ByStorage, updates: Iterable[tuple[Config, float]],
    ) -> float:  # fmt: skip
        """A lower bound on the seconds of a step with one of these ways to store the state."""
        parallel = scheduled.parallel
        if parallel.layer_split == "balanced" and parallel.memory_limit:
            return 0.0  # the limit may ask for other layers
        # Groups have one scan, unless every action gathers its layers.
        least: dict[object, tuple[float, tuple[bool, int]]] = {}
        for one, update in updates:
            way = _storage(one)
            alike = way if one.parallel.reshards else False
            least[alike] = min((update, way), least.get(alike, (math.inf, way)))
        steps = []
        for update, way in least.values():
            costs = seconds[way].costs(
                layers, shared_by=parallel.vocab_shared_by, split=facts.is_split,
                recomputes=scheduled.train.remat == "ahead",
            )  # fmt: skip
            steps.append(least_seconds(facts, costs) + update)
        return min(steps) * _ROUNDING

    def _may_fit(self, shape: Config, result: SearchResult) -> bool:
        layout, sizes = least_layout(shape), []
        for one in self.space.storages(shape):
            sizes.append(rank_bytes(one, layout, None).total)
            result.note(sizes[-1], one)
        return min(sizes) <= self.usable

    def _least_seconds_of(self, scheduled: Config) -> _ByStorage:
        """The least seconds of ops of a schedule, for every way to store the state.

        Layers may run in halves, which are not traced for it.
        """
        timed: dict[object, OpSeconds] = {}
        seconds = {}
        for one in self.space.storages(scheduled):
            if (way := _storage(one)) in seconds:
                continue
            alike = way if one.parallel.reshards else False
            if alike not in timed:
                timed[alike] = op_seconds(one, self.hardware).least_in_halves
            rates = rates_of_replicas(one, self.hardware)
            seconds[way] = structs.replace(timed[alike], **rates)
        return seconds

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


def _storage(config: Config) -> tuple[bool, int]:
    """How replicas store layers: whether every action gathers them, and in how many groups."""
    return config.parallel.reshards, config.parallel.dp_replicate
