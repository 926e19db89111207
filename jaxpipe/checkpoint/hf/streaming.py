"""Checkpoints without a mesh, written and read a few arrays at a time on one host.

`CheckpointStore` saves arrays on devices. This module moves parameters between a checkpoint and
other
files, and they need not fit into memory: a `LazyArray` is read only when it is written.
"""

import contextlib
import functools
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import type_handlers

from jaxpipe.checkpoint.disk_keys import EMBED_HEAD, embed_head_key
from jaxpipe.checkpoint.hf.adapters import merging
from jaxpipe.checkpoint.integrity import (
    FORMAT,
    DamagedError,
    add_checksum,
    check_files,
    has_checksums,
    read_meta,
    succeed_on_all_processes,
)
from jaxpipe.checkpoint.listing import is_being_removed, is_complete
from jaxpipe.checkpoint.orbax_port.handler import StateHandler, StateSave
from jaxpipe.checkpoint.orbax_port.stores import use_store_of
from jaxpipe.config import Config, ConfigError, from_builtins
from jaxpipe.model.layers.lora import NAME
from jaxpipe.runtime import processes
from jaxpipe.runtime.storage.files import AnyPath, absolute

Tree = Any
# A reader decompresses a full chunk for any element of it, and a writer holds one compressed chunk
# in addition to the array.
_CHUNK_BYTES = 16 * 2**20
_WEIGHT = ("optimizer", "b1")  # schedule-free AdamW: weight of the average in the trained params


@dataclass(frozen=True)
class LazyArray:
    """An array of known shape and dtype that every call of `read` loads."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _LazyHandler(type_handlers.NumpyHandler):
    """Writes lazy arrays one by one, in the form in which a run saves its arrays."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    def typestr(self) -> str:
        """The type that Orbax records for the arrays: that of `jax.Array`."""
        return type_handlers.ArrayHandler().typestr()

    async def serialize(
        self,
        values: Sequence[LazyArray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[Any]:
        """Read and write each array before the next is read; return no futures."""
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values)):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()
        return []


def save_parameters(directory: AnyPath, state: Tree, meta: dict[str, Any]) -> AnyPath:
    """Write a keyed tree of `LazyArray`s as a checkpoint of step 0; return the step's directory.

    The checkpoint has kind "params": its state is `params`, and `variables` if the model has any,
    without moments and step, and its data position is 0. It gets its name only when it is complete.

    Raises `ConfigError` where the directory already holds checkpoints or cannot be written.
    """
    directory = absolute(directory)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), state)
    about = {"format": FORMAT, "kind": "params", "step": 0, "position": 0}
    try:
        with _manager(directory) as manager:
            if steps := sorted(manager.all_steps()):
                raise ConfigError(
                    f"{directory} holds checkpoints of steps {steps} already: choose another "
                    f"directory or move them."
                )
            manager.save(
                0,
                args=ocp.args.Composite(
                    state=StateSave(state, save_args=chunks),
                    meta=ocp.args.JsonSave(add_checksum(meta | about)),
                ),
            )
    except OSError as error:
        raise ConfigError(
            f"the checkpoint cannot be written to {directory} ({error.strerror or error}): choose "
            f"a directory that is writable and has room."
        ) from error
    return directory / "0"


@contextlib.contextmanager
def _manager(directory: AnyPath) -> Iterator[ocp.CheckpointManager]:
    use_store_of(directory)
    registry = type_handlers.create_type_handler_registry(
        (LazyArray, _LazyHandler()), (jax.Array, type_handlers.ArrayHandler())
    )
    manager = ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
        item_handlers={
            "state": StateHandler(type_handler_registry=registry),
            "meta": ocp.JsonCheckpointHandler(),
        },
    )
    try:
        yield manager
    finally:
        manager.close()


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on disk, of a full state or of parameters only.

    Args:
      directory: the directory of the step.

    Raises:
      ConfigError: there is no checkpoint, it is damaged, or its format is newer.
    """

    directory: AnyPath

    def __post_init__(self) -> None:
        use_store_of(self.directory)
        _ = self.meta

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """The checkpoint's metadata: step, data position, configuration."""
        if not is_complete(absolute(self.directory)):
            raise self._not_a_checkpoint("it is not a complete checkpoint of Orbax")
        with self._report_damage():
            return read_meta(self.directory)

    @property
    def config(self) -> Config:
        """The configuration of the run that saved it.

        Raises `ConfigError` where it holds none that this version reads.
        """
        try:
            return from_builtins(tomllib.loads(self.meta["config"]))
        except (KeyError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"checkpoint {self.directory} holds no configuration that this version reads: use "
                f"the version that saved it, or export it with --config."
            ) from error

    @functools.cached_property
    def checked_files(self) -> int:
        """The number of files of the state that match their checksums; 0: there are no checksums.

        Raises `ConfigError` where a file does not match.
        """
        if not has_checksums(self.meta):
            return 0
        with self._report_damage():
            return check_files(self._item("state"))

    @functools.cached_property
    def leaves(self) -> dict[tuple[str, ...], Any]:
        """Shape and dtype of every array by path, as `("params", "layers", "17", "attn", "wq")`."""
        with self._report_damage(checked=self.checked_files > 0):
            stored = ocp.PyTreeCheckpointHandler().metadata(self._item("state"))
        paths, _ = jax.tree.flatten_with_path(stored.tree, is_leaf=lambda n: hasattr(n, "shape"))
        renamed = {embed_head_key(self.meta): EMBED_HEAD}
        names = ((map(_key, path), leaf) for path, leaf in paths)
        return {tuple(renamed.get(key, key) for key in path): leaf for path, leaf in names}

    def read(self, paths: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
        """Read the arrays at these paths only.

        Raises `ConfigError` where a file of the state is damaged.
        """
        renamed = {EMBED_HEAD: embed_head_key(self.meta)}
        on_disk = {path: tuple(renamed.get(key, key) for key in path) for path in paths}
        shapes = {
            on_disk[path]: jax.ShapeDtypeStruct(self.leaves[path].shape, self.leaves[path].dtype)
            for path in paths
        }
        wanted = unflatten_dict(shapes)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        request = ocp.args.PyTreeRestore(wanted, restore_args=as_numpy, partial_restore=True)
        with self._report_damage(checked=self.checked_files > 0):
            state = ocp.PyTreeCheckpointHandler().restore(self._item("state"), args=request)
        arrays = flatten_dict(state)
        return [arrays[on_disk[path]] for path in paths]

    def parameters(self, paths: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
        """Read the parameters to evaluate at these paths, with low-rank adapters merged."""
        if not any(NAME in path for path in self.leaves):
            return self.unmerged(paths)
        lora = self.config.lora
        return merging(self.unmerged, self.has, lora.alpha / lora.rank)(paths)

    def has(self, path: tuple[str, ...]) -> bool:
        """Whether there is a parameter at a path."""
        return ("params", *path) in self.leaves

    def unmerged(self, paths: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
        """Read the parameters to evaluate at these paths: `("layers", "17", "attn", "wq")`.

        They are the trained parameters y, except for schedule-free AdamW, whose moments contain z
        and b1: then they are the average `(y - (1 - b1) z) / b1`, as in
        `optax.contrib.schedule_free_eval_params`.
        """
        trained = self.read([("params", *path) for path in paths])
        moments = [("optimizer", "z", *path) for path in paths]
        if not self.leaves.keys() >= {_WEIGHT, *moments}:
            return trained
        weight, *others = self.read([_WEIGHT, *moments])
        return [(y - (1 - weight) * z) / weight for y, z in zip(trained, others)]

    def _item(self, name: str) -> AnyPath:
        return absolute(self.directory) / name

    @contextlib.contextmanager
    def _report_damage(self, checked: bool = True) -> Iterator[None]:
        try:
            with succeed_on_all_processes(processes.group(), self.directory, checked):
                yield
        except DamagedError as error:
            if is_being_removed(self.directory):
                raise ConfigError(
                    f"checkpoint {self.directory} was removed while it was read: take a later one, "
                    f"or train with a larger checkpoint.keep."
                ) from error
            raise ConfigError(
                f"checkpoint {self.directory} is damaged ({error}): take an earlier one."
            ) from error

    def _not_a_checkpoint(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.directory} is not a checkpoint of jaxpipe ({why}): give the directory of one "
            f"step, such as runs/quickstart/checkpoints/100."
        )


def _key(part: Any) -> str:
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
