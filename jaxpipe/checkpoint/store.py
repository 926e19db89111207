"""The checkpoints of a run: a directory of Orbax, which any plain Orbax program can read."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpipe.checkpoint.exclusion import Exclusion, leaves_by_name, replaced
from jaxpipe.checkpoint.handler import state_handler
from jaxpipe.checkpoint.keying import Keying
from jaxpipe.checkpoint.memory import freed_at_once
from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import processes

Tree = Any
FORMAT = 1  # raised when the keys on disk change


class Checkpoints:
    """The checkpoints of one run: a context manager that waits for pending saves on leaving.

    All processes of a run call its methods alike. The newest `keep` stay on disk, and those whose
    step `keep_every` divides (0: no more). Raises `ConfigError` where the directory cannot be
    written.

    >>> import jax, tempfile
    >>> from jaxpipe.parallel import Sharding, StageLayout, make_mesh
    >>> layout, mesh = StageLayout((2,)), make_mesh(pp=1, devices=jax.devices()[:1])
    >>> layers = layout.stack([{"up": jnp.ones(8)}] * 2)
    >>> params = {"shared": {"norm": jnp.ones(4)}, "layers": layers}
    >>> sharding = Sharding(mesh)
    >>> params = jax.device_put(params, sharding.shardings(params))
    >>> how = {"keep": 2, "asynchronous": False, "keying": Keying(layout, sharding)}
    >>> with (
    ...     tempfile.TemporaryDirectory() as directory,
    ...     Checkpoints(Path(directory), **how) as checkpoints,
    ... ):
    ...     checkpoints.save(7, {"params": params}, {"position": 56})
    ...     state, meta = checkpoints.restore({"params": params}, say=print)
    >>> meta["position"], state["params"]["layers"][1]["up"].shape
    (56, (1, 8))
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool,
        keying: Keying,
        say: Callable[[str], None] = print,
    ):
        self.directory = directory.absolute()
        self.keying = keying
        self._say = say
        with processes.first_before_others("checkpoints"):
            _check_writable(self.directory)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every or None,
            enable_async_checkpointing=asynchronous,
            create=False,
            multiprocessing_options=_without_devices(),
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers={"state": state_handler(), "meta": ocp.JsonCheckpointHandler()},
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None and processes.started() > 1:
            return  # another process may be gone, and to finish a save with it would take for ever
        self.wait()
        with self._unwritten_is_said():
            self._manager.close()

    def wait(self) -> None:
        """Until what is being saved is on disk."""
        with self._unwritten_is_said():
            self._manager.wait_until_finished()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def written(self, step: int) -> bool:
        """Whether that step is on disk, once nothing is being saved any more."""
        self.wait()
        return step in steps_in(self.directory)

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Start saving; returns once the state is copied from the devices, if asynchronous.

        `state` has trees in stage form; `meta` is anything that JSON can write. A step that is
        there already is left as it is.

        What cannot be written is said, and training goes on: the checkpoints before it stay.
        """
        if step in self.steps:
            return
        self.wait()  # says what went wrong with the one before
        keyed = self.keying.keyed(state)
        with self._unwritten_is_said():
            self._check_all_can_write()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(keyed),
                    meta=ocp.args.JsonSave(meta | {"format": FORMAT, "step": step}),
                ),
            )

    def restore(self, like: Tree, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]] | None:
        """The newest readable `(state, meta)` in the form of `like`, or None if there is none.

        `like` is a state in stage form, or only its shapes.

        A damaged checkpoint is renamed out of the way, said, and the one before it is taken.
        Raises `ConfigError` for a checkpoint of another model, naming the first differing leaf.
        """
        for step in reversed(self.steps):
            read, reason = None, ""
            try:
                read = read_state(self.directory / str(step), self.keying, like)
            except ConfigError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds on damaged files
                reason = first_line(error)
            if not processes.largest(int(read is None)):
                return read
            aside = self._set_aside(step)
            say(
                f"checkpoint {step} is damaged ({reason or 'another process cannot read it'}): "
                f"moved to {aside}, trying the one before"
            )
        return None

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / f"damaged-{step}"
        with processes.first_before_others(f"damaged {step}"):
            if processes.first():
                (self.directory / str(step)).rename(aside)
        self._manager.reload()
        return aside

    def _check_all_can_write(self) -> None:
        """Raise `OSError` now: Orbax would wait for its own threads five minutes and more."""
        reason = ""
        try:
            _touch(self.directory)
        except OSError as error:
            reason = error.strerror or first_line(error)
        if processes.largest(int(bool(reason))):
            raise OSError(reason or "another process cannot write")

    @contextlib.contextmanager
    def _unwritten_is_said(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._say(
                f"warning: a checkpoint could not be written ({first_line(error)}): training goes "
                f"on, and the checkpoints before it are as they were; make room in "
                f"{self.directory}, or make it writable."
            )


def newest(path: Path) -> Path:
    """The newest checkpoint of a run, or of a directory of checkpoints; a checkpoint is itself.

    Raises `ConfigError` where there is none.
    """
    path = path.absolute()
    for directory in (path, path / "checkpoints"):
        if (directory / "state").is_dir():
            return directory
        if steps := steps_in(directory):
            return directory / str(steps[-1])
    raise ConfigError(
        f"checkpoint.resume={str(path)!r} holds no checkpoint: give 'auto', 'none', a run's "
        f"directory, or that of one checkpoint."
    )


def steps_in(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory of checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def read_state(
    path: Path, keying: Keying, like: Tree, exclusion: Exclusion | None = None
) -> tuple[Tree, dict[str, Any]]:
    """The `(state, meta)` of one checkpoint in the form of `like`, a state or its shapes.

    Of a `like` that has only some of a state's parts, only these are read; some of the parameters
    may be excluded. Variables that the checkpoint has not, or has in other shapes, are left out of
    the state, and those that `like` has not are not read. Each process reads what its own devices
    hold. Raises `ConfigError` for a checkpoint of another model or of a newer format, and much else
    where files are damaged.
    """
    meta = ocp.JsonCheckpointHandler().restore(path / "meta")
    if meta["format"] > FORMAT:
        raise ConfigError(
            f"checkpoint {path} has format {meta['format']}, this version reads up to {FORMAT}: "
            f"use the version of jaxpipe that wrote it, or a newer one."
        )
    if meta.get("kind") == "params" and like.keys() != {"params"}:
        raise ConfigError(
            f"checkpoint {path} holds parameters only: set checkpoint.parameters_only=true to "
            f"start from them."
        )
    handler = state_handler()
    stored = handler.metadata(path / "state").tree
    like = _with_variables_of(stored, like)
    shapes = keying.keyed_shapes(like)  # those on disk
    left_out = exclusion.names(shapes) if exclusion else frozenset()
    _check_same_model(shapes, stored, path, left_out)
    with freed_at_once():
        state = handler.restore(
            path / "state",
            args=ocp.args.PyTreeRestore(
                replaced(shapes, left_out, lambda _: ocp.PLACEHOLDER),
                restore_args=keying.restore_args(like),
                partial_restore=True,
            ),
        )
        if exclusion and left_out:
            new = leaves_by_name(keying.rows(exclusion.fresh()))
            state = replaced(state, left_out, lambda name: new[name])
        return keying.staged(state, like), meta


def _without_devices() -> ocp.options.MultiprocessingOptions:
    """How Orbax's processes wait for each other: as ours do, beside steps, and not by devices.

    By default they meet in a collective. That they are named makes them meet at the service.
    """
    every = set(range(jax.process_count())) if jax.process_count() > 1 else None
    return ocp.options.MultiprocessingOptions(active_processes=every)


def _check_writable(directory: Path) -> None:
    try:
        _touch(directory)
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be written to {directory} ({error.strerror}): make it a writable "
            f"directory or choose another run.dir."
        ) from error


def _touch(directory: Path) -> None:
    """Make the directory if it is not there, and a file in it, and remove that again."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".writable-{os.getpid()}"
    probe.touch()
    probe.unlink(missing_ok=True)


def _with_variables_of(stored: Tree, like: Tree) -> Tree:
    """`like` with those of its variables that are stored alike."""
    if not isinstance(like.get("variables"), dict):
        return like

    def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
        return {name: tuple(leaf.shape) for name, leaf in leaves_by_name(tree).items()}

    held = stored.get("variables") or {}
    kept = {
        name: leaf for name, leaf in like["variables"].items()
        if name in held and shapes({name: leaf}) == shapes({name: held[name]})
    }  # fmt: skip
    rest = {name: part for name, part in like.items() if name != "variables"}
    return rest | ({"variables": kept} if kept else {})


def _check_same_model(expected: Tree, stored: Tree, where: Path, left_out: frozenset[str]) -> None:
    wanted, held = (
        {name: leaf for name, leaf in leaves_by_name(tree).items() if name not in left_out}
        for tree in (expected, stored)
    )
    want = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    have = {name: tuple(leaf.shape) for name, leaf in held.items()}
    have = {
        name: shape for name, shape in have.items()
        if name in want or name.split("/")[0] in expected.keys() - {"variables"}
    }  # fmt: skip
    for name in sorted({*want, *have}, key=lambda name: (not name.startswith("params"), name)):
        if want.get(name) != have.get(name):
            raise ConfigError(
                f"checkpoint {where} is of another model: {name} has shape "
                f"{have.get(name, 'none (absent)')} there and {want.get(name, 'none (absent)')} in "
                f"this configuration; change [model] back or use another run.dir."
            )
        kinds = [jnp.issubdtype(leaf[name].dtype, jnp.inexact) for leaf in (wanted, held)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"checkpoint {where} is of another model: {name} has dtype {held[name].dtype} "
                f"there and {wanted[name].dtype} in this configuration; use another run.dir."
            )
