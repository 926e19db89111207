"""A check for devices that compute wrong numbers without an error (silent data corruption).

The gradients of a step are computed by the same program with the devices of the mesh in two orders.
Every place of the mesh has a fingerprint of its gradient sums before any reduction over devices, so
a device that computes wrongly shows at its own place. Where two orders differ, a third is computed:
at a place that three devices have had, the one that the other two contradict is wrong. A device
whose wrong numbers travel through the pipeline also changes other places, but only it can be at
such a place in every order.

The step that the run itself makes is another program, with overlap and an update, and is not
compared: a device that fails now and then is found in a check, not in the step where it failed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe.run.history import versions
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.compile_cache import compile_timed
from jaxpipe.runtime.storage.directory import WriteGuard
from jaxpipe.runtime.storage.spool import local_folder
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
FOLDER = "corruption"  # in the run directory
_ORDERS = 3


class CheckedGradients(NamedTuple):
    """Gradients of a step, computed with the devices in one order.

    Attributes:
      fingerprints: of every place of the mesh, flat, over all processes.
      devices: the device of every place, flat.
      gradients: reduced, as the optimizer would get them.
    """

    fingerprints: np.ndarray
    devices: list[jax.Device]
    gradients: Tree


class CorruptionCheck:
    """Checks every `train.corruption_check_every`-th step of a run before it is made."""

    def __init__(self, trainer: Trainer, group: Group, say: Callable[[str], None]):
        self._trainer, self._group, self._say = trainer, group, say
        self._every = trainer.config.train.corruption_check_every
        self._compiled: dict[int, Any] = {}  # gradient programs by order

    def is_due(self, step: int) -> bool:
        """Whether this step is checked."""
        return bool(self._every) and step % self._every == 0

    def find(self, step: int, state: State, batch: Tree) -> str:
        """What is wrong with the devices, as a sentence; "" if all agree. All processes call it.

        Neither state nor batch, which are on the run's own mesh, are changed or donated. Batch,
        gradients and versions of a difference are kept in `<run.dir>/corruption/step-<step>`.
        """
        runs = [self._compute(order, state, batch) for order in range(_ORDERS - 1)]
        if (runs[0].fingerprints == runs[1].fingerprints).all():
            return ""
        runs.append(self._compute(_ORDERS - 1, state, batch))
        results = np.stack([run.fingerprints for run in runs])
        devices = np.array([[device.id for device in run.devices] for run in runs])
        wrong = outvoted(results, devices)
        folder = local_folder(self._trainer.config.run.dir) / FOLDER / f"step-{step}"
        with WriteGuard(self._say).attempt(str(folder)):
            self._keep(folder, batch, runs, wrong)
        differing = int((results != results[0]).any(axis=0).sum())
        return (
            f"the gradients of step {step} have other bits on other devices, at {differing} of "
            f"{results.shape[1]} places of the mesh: {self._named(wrong)}; batch, gradients and "
            f"versions are in {folder}"
        )

    def _compute(self, order: int, state: State, batch: Tree) -> CheckedGradients:
        """Gradients with the devices moved on by `order` places; 0: as in the run."""
        trainer = self._trainer_of(order)
        how = trainer.state_shardings
        inputs = state.params, batch, state.variables, state.guard.loss_scale
        if order:
            rows = dict.fromkeys(batch, trainer.sharder.sharding)
            shardings = how.params, rows, how.variables, how.guard.loss_scale
            inputs = jax.device_put(inputs, shardings)
        if order not in self._compiled:
            self._compiled[order], took = compile_timed(gradient_program(trainer), *inputs)
            self._say(f"corruption check {order}: {took}")
            # gloo gives up on processes that compile for longer than others
            self._group.barrier(f"compiled corruption check {order}")
        marks, gradients = self._compiled[order](*inputs)
        fingerprints = _gathered(marks, self._group)
        return CheckedGradients(fingerprints, list(trainer.mesh.devices.flat), gradients)

    @cached_property
    def _trainer_of(self) -> Callable[[int], Trainer]:
        devices = self._trainer.devices or jax.devices()

        @cache
        def of(order: int) -> Trainer:
            if not order:
                return self._trainer
            return replace(self._trainer, devices=[*devices[order:], *devices[:order]])

        return of

    def _named(self, wrong: Sequence[int]) -> str:
        """The devices in words."""
        mesh = self._trainer.mesh
        if not wrong:
            return "no two of three devices agree, so none of them is named"
        names = []
        for device in wrong:
            (found,) = [of for of in np.ndenumerate(mesh.devices) if of[1].id == device]
            axes = zip(mesh.axis_names, found[0], mesh.devices.shape)
            place = " ".join(f"{name}={i}" for name, i, size in axes if size > 1)
            names.append(f"device {device} (process {found[1].process_index}, {place})")
        listed = " or ".join(names)
        return f"{listed} computes wrong numbers, which two others contradict"

    def _keep(
        self, folder: Path, batch: Tree, runs: list[CheckedGradients], wrong: list[int]
    ) -> None:
        """Write the shards that this process has, and on process 0 the report."""
        folder.mkdir(parents=True, exist_ok=True)
        shards: dict[str, Any] = dict(_shards("batch", batch))
        for order, run in enumerate(runs):
            shards |= dict(_shards(f"gradients-{order}", run.gradients))
        with (folder / f"process-{self._group.index}.npz").open("wb") as file:
            np.savez(file, **shards)
        if self._group.is_first:
            report = versions() | {
                "wrong_devices": wrong,
                "device_kinds": [device.device_kind for device in runs[0].devices],
                "orders": [[device.id for device in run.devices] for run in runs],
                "fingerprints": [run.fingerprints.tolist() for run in runs],
            }
            (folder / "report.json").write_text(json.dumps(report))


def gradient_program(trainer: Trainer) -> Any:
    """Compiled `(params, batch, variables, loss_scale) -> (fingerprints, gradients)`."""
    execution = replace(trainer.execution, overlap_sums=False, fingerprints=True)
    pipeline, how = replace(trainer.pipeline, execution=execution), trainer.state_shardings

    def run(params: Tree, batch: Tree, variables: Tree, loss_scale: Any) -> tuple[Any, Tree]:
        outputs = pipeline.step(params, batch, variables, loss_scale)
        return outputs.fingerprints, outputs.gradients

    return jax.jit(
        run,
        in_shardings=(how.params, trainer.sharder.sharding, how.variables, how.guard.loss_scale),
        compiler_options=trainer.compiler_options,
    )


def outvoted(results: np.ndarray, devices: np.ndarray) -> list[int]:
    """The devices that may be wrong, from three results `[3, places]` and who computed them.

    A result that differs from two equal ones of other devices is wrong. A wrong device may spoil
    results of others, so devices that are wrong in every order with wrong results are returned,
    or all wrong ones if there are none.

    >>> results = np.array([[1, 2, 3], [1, 9, 3], [1, 2, 3]])
    >>> outvoted(results, np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]]))
    [2]
    """
    suspects = []
    for order in range(_ORDERS):
        one, other = np.delete(results, order, axis=0)
        if wrong := set(devices[order, (one == other) & (results[order] != one)].tolist()):
            suspects.append(wrong)
    if not suspects:
        return []
    return sorted(set.intersection(*suspects) or set.union(*suspects))


def _gathered(marks: jax.Array, group: Group) -> np.ndarray:
    """The fingerprints of all places, flat, from those on this process's devices."""
    own = {
        int(np.ravel_multi_index([part.start or 0 for part in shard.index], marks.shape)): int(
            np.asarray(shard.data).item()
        )
        for shard in marks.addressable_shards
    }
    merged: dict[str, int] = {}
    for text in group.gather("fingerprints", json.dumps(own)):
        merged |= json.loads(text)
    return np.array([merged[str(place)] for place in range(marks.size)], np.uint32)


def _shards(name: str, tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the shards on this process's devices with names like `batch/inputs/device-0`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        of = jax.tree_util.keystr(path, simple=True, separator="/")
        for shard in leaf.addressable_shards:
            yield f"{name}/{of}/device-{shard.device.id}", np.asarray(shard.data)
