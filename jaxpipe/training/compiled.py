"""Compiled steps for batches of several lengths: one program per length, compiled ahead of use."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpipe.data.batches import DataSplit
from jaxpipe.runtime import position
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.compile_cache import compile_timed
from jaxpipe.runtime.programs.exposed import why_exposed
from jaxpipe.runtime.programs.program_store import load_program
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
_KEPT = 32  # programs; the least recently used is dropped and compiled again when needed
_AHEAD = 32  # steps to look ahead for lengths
_AT_ONCE = 4  # lengths to look up between two steps


class CompiledSteps:
    """A trainer's compiled steps for batches of any length; a context manager.

    The processes of `group` run them together, once all have compiled them.

    With `train.variable_length` one thread compiles a program for every (microbatches, length), in
    the order of requests. The lengths are a function of (seed, position), so the programs of the
    next steps are compiled while earlier steps run, in the same order on all processes. Otherwise
    there is one length, and the steps are the trainer's own.
    """

    def __init__(self, trainer: Trainer, group: Group, say: Callable[[str], None]):
        self._trainer, self._group, self._say = trainer, group, say
        self._varies = trainer.config.train.variable_length
        self.fused = FusedSteps(trainer)
        self._programs: OrderedDict[tuple[str, int, int], Future[Any]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler")
        self._looked = 0  # data position up to which lengths have been looked up
        self._met: dict[Any, Any] = {}  # programs that all processes have compiled, by key
        self._ready: set[Any] = set()  # keys of `_programs` that all processes have compiled

    def __enter__(self) -> "CompiledSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def train_step(self, state: State, batch: Tree) -> tuple[State, dict[str, Any]]:
        """Run `Trainer.train_step`, compiled for the batch's length."""
        return self._program("train_step", state, batch)(state, batch)

    def train_steps(self, state: State, batch: Tree) -> tuple[State, dict[str, Any]]:
        """Run `FusedSteps.train_steps`."""
        return self._compiled_by_all("train_steps", self.fused.train_steps, state, batch)(
            state, batch
        )

    def eval_step(self, state: State, batch: Tree) -> Any:
        """Run `Trainer.eval_step`, compiled for the batch's length."""
        return self._program("eval_step", state, batch)(state, batch)

    def look_ahead(self, data: DataSplit, position: int, left: int) -> None:
        """Queue compilation for the steps after the one at `position`; `left` steps remain."""
        if not self._varies:
            return
        config, step = self._trainer.config, self._trainer.samples_per_step
        self._looked = max(self._looked, position + step)
        for _ in range(_AT_ONCE):
            if self._looked > position + min(_AHEAD, left) * step:
                return
            length = config.length_of(data.contents(self._looked, step).longest)
            self._ask("train_step", config.train.grad_accum_steps, length)
            self._looked += step

    def _compiled_by_all(self, key: Any, program: Any, state: State, batch: Tree) -> Any:
        """The compiled program; waits until all processes have compiled it.

        At its first collective a process waits only half a minute for the others before gloo gives
        up, and compile times may differ by more.
        """
        if key not in self._met:
            phase = position.now.phase
            self._met[key], took = compile_timed(
                program, state, batch,
                enter=position.enter,
                saved=partial(self._saved, key),
                stored=self._trainer.programs.find(key, state, batch),
            )  # fmt: skip
            self._say(f"{key}: {took}")
            if warning := why_exposed(self._met[key], jax.local_devices()[0]):
                self._say(f"warning: {key}: {warning}")
            self._group.barrier(f"compiled {key}")
            position.enter(phase)
        return self._met[key]

    def _saved(self, key: str, lowered: jax.stages.Lowered) -> tuple[Any, str]:
        """The program that `plan --check-gpu --save` has compiled, or None and why it is not used.

        It saves training steps alone.
        """
        directory = self._trainer.config.runtime.programs
        if not directory or key == "eval_step":
            return None, ""
        devices = list(self._trainer.mesh.devices.flat)
        options = self._trainer.compiler_options
        return load_program(self._group, Path(directory), key, lowered, devices, options)

    def _program(self, name: str, state: State, batch: Tree) -> Any:
        """The program for the batch's shape; waits until all processes have compiled it."""
        if not self._varies:
            return self._compiled_by_all(name, getattr(self._trainer, name), state, batch)
        parallel = self._trainer.config.parallel
        rows, _, length = batch["inputs"].shape
        whole, phase = length * parallel.rows_per_sequence, position.now.phase
        position.enter("compile")
        key = name, rows // parallel.slices, whole
        program = self._ask(*key).result()
        if key not in self._ready:
            self._group.barrier("compiled {} of {} rows of {}".format(*key))
            self._ready.add(key)
        position.enter(phase)
        return program

    def _ask(self, name: str, microbatches: int, length: int) -> Future[Any]:
        """A future of the program for this shape, which is compiled if it is not cached."""
        key = name, microbatches, length
        if key not in self._programs:
            self._programs[key] = self._compiler.submit(self._compile, *key)
            if len(self._programs) > _KEPT:
                self._ready.discard(self._programs.popitem(last=False)[0])
        self._programs.move_to_end(key)
        return self._programs[key]

    def _compile(self, name: str, microbatches: int, length: int) -> Any:
        trainer, state = self._trainer, self._trainer.state_shapes
        batch = trainer.sharder.shapes(length, trains=name == "train_step")
        # Several processes would have to agree here, beside what their main threads agree on.
        stored = trainer.programs.find(name, state, batch) if self._group.count == 1 else None
        program, took = compile_timed(getattr(trainer, name), state, batch, stored=stored)
        self._say(f"{name} for {microbatches} microbatches of {length:,} tokens a row: {took}")
        return program
