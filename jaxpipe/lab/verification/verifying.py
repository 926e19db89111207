"""A smaller run's steps, saved and restored between meshes, against the reference."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from msgspec import structs

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config import Config
from jaxpipe.core.mesh import StageLayout
from jaxpipe.lab.verification.observed import (
    Deviation,
    Observed,
    compare,
    compare_bits,
    named_parameters,
)
from jaxpipe.lab.verification.problem import Batch, batch_of, float64_values
from jaxpipe.lab.verification.steps import Float64Trainer, Reference, gpipe_on
from jaxpipe.training.initial import full_parameters
from jaxpipe.training.state import State

Say = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """The steps that are compared; each is computed once.

    Attributes:
      config: settings of the smaller run (`shrinking.shrink`).
      say: reports progress.
    """

    config: Config
    say: Say = print

    @cached_property
    def trainer(self) -> Float64Trainer:
        """The run on its mesh."""
        return Float64Trainer.of(self.config)

    @cached_property
    def other(self) -> Float64Trainer:
        """The same model on another mesh."""
        return Float64Trainer.of(_on_another_mesh(self.config))

    @cached_property
    def reference(self) -> Reference:
        """The model on one device."""
        return Reference(self.config)

    @cached_property
    def batches(self) -> tuple[Batch, Batch]:
        """The host batches of two steps."""
        return batch_of(self.config, 0), batch_of(self.config, 1)

    @cached_property
    def want(self) -> tuple[Observed, Observed]:
        """Two steps of the reference."""
        with _timed(self.say, "the reference on one device"):
            state, first = self.reference.observe(self.reference.init(), self.batches[0], 0)
            _, second = self.reference.observe(state, self.batches[1], self._samples)
        return first, second

    @cached_property
    def begin(self) -> State:
        """The state on the mesh before the first step."""
        values = float64_values(self.reference.trainer.model, self.config)
        return self.trainer.state_with(*values)

    @cached_property
    def first(self) -> tuple[State, Observed]:
        """The state on the mesh after the first step, and what that computes."""
        begin, trainer = self.begin, self.trainer
        with _timed(self.say, f"the step on {self.config.parallel.mesh}"):
            return trainer.observe(begin, trainer.put(self.batches[0], 0))

    @cached_property
    def restored(self) -> State:
        """The state after the first step, saved and restored on the other mesh."""
        state, trainer, other = self.first[0], self.trainer, self.other
        with (
            _timed(self.say, f"saved, and restored on {other.config.parallel.mesh}"),
            tempfile.TemporaryDirectory() as directory,
        ):
            with self._store(directory, trainer) as store:
                store.save(1, state.parts(), {"guard": state.guard.saved()})
            with self._store(directory, other) as store:
                parts, meta = store.restore(_in_float64(other.state_shapes).parts(), self.say)
        return other.state_of(parts, meta["guard"])

    def second(self, state: State) -> Observed:
        """What the second step on the other mesh computes."""
        batch = self.other.put(self.batches[1], self._samples)
        with _timed(self.say, f"the step on {self.other.config.parallel.mesh}"):
            return self.other.observe(state, batch)[1]

    def deviations(self) -> list[Deviation]:
        """The largest errors of everything that is verified."""
        saved, first = self.first
        every = [self._initial_values(), *compare(first, self.want[0])]
        params = named_parameters(self.trainer, saved.params)
        restored = named_parameters(self.other, self.restored.params)
        every.append(compare_bits("restored parameters", restored, params))
        second = self.second(self.restored)
        return every + compare(second, self.want[1], " after the restore")

    def _initial_values(self) -> Deviation:
        """The float32 initial values on the mesh, which have the bits of those on one device."""
        with _timed(self.say, "initial values"):
            trainer, one = self.trainer, self.reference.trainer
            initial = named_parameters(trainer, trainer.init_parameters())
            layout: StageLayout = one.layout
            full = full_parameters(one.model, layout, self.config.train.seed)
            return compare_bits("initial values", initial, named_parameters(one, full))

    @property
    def _samples(self) -> int:
        return self.trainer.samples_per_step

    def _store(self, directory: str, trainer: Float64Trainer) -> CheckpointStore:
        keying = StateKeying(trainer.layout, trainer.sharding)
        return CheckpointStore(
            Path(directory), keep=1, asynchronous=False, keying=keying, say=self.say
        )


def _on_another_mesh(config: Config) -> Config:
    """The configuration on two devices, as replicas or, if there is one rank, as a pipeline.

    One pipeline rank has all layers in a row: a loop, if the run has one, saves time to compile.
    """
    parallel, size = config.parallel, config.batch_shape["batch_size"]
    mesh = {"pp": 1, "dp": 1}
    if parallel.pp == 1 and config.model.pipeline_layers > 1:
        mesh["pp"] = 2
    elif size % (4 if config.reads_pairs else 2) == 0:
        mesh["dp"] = 2
    train = structs.replace(
        config.train, microbatch_size=size // mesh["dp"], loss_chunks=1, remat_layers=0,
        offload_layers=0,
    )  # fmt: skip
    other = gpipe_on(config, **mesh)
    if mesh["pp"] == 1:
        other = structs.replace(other, unroll_layers=parallel.unroll_layers)
    runtime = config.runtime
    if runtime.cpu_devices:
        runtime = structs.replace(runtime, cpu_devices=other.devices)
    return structs.replace(config, parallel=other, train=train, runtime=runtime)


def _in_float64(tree: Any) -> Any:
    """Shapes whose floats are float64."""

    def wide(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float64 if floating else leaf.dtype)

    return jax.tree.map(wide, tree)


@contextmanager
def _timed(say: Say, what: str) -> Iterator[None]:
    """Report what was done, and the seconds that it took."""
    start = time.perf_counter()
    yield
    say(f"{time.perf_counter() - start:6.1f} s  {what}")
