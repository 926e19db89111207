"""The checkpoints of a run: a directory of Orbax, which any plain Orbax program can read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxpipe.checkpoint.keying import Keying
from jaxpipe.config import ConfigError

Tree = Any
FORMAT = 1  # raised when the keys on disk change


class Checkpoints:
    """The checkpoints of one run: a context manager that waits for pending saves on leaving.

    Raises `ConfigError` where the directory cannot be written.
    """

    def __init__(self, directory: Path, *, keep: int, asynchronous: bool, keying: Keying):
        self.directory = directory.absolute()
        self.keying = keying
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {directory} ({error.strerror}): make it a "
                f"writable directory or choose another run.dir."
            ) from error
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous
        )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Start saving; returns once the state is copied from the devices, if asynchronous."""
        if step in self.steps:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(self.keying.keyed(state)),
                meta=ocp.args.JsonSave(meta | {"format": FORMAT, "step": step}),
            ),
        )

    def restore(self, like: Tree, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]] | None:
        """The newest readable `(state, meta)` in the form of `like`, or None if there is none.

        `like` is a state in stage form, or only its shapes.

        A damaged checkpoint is renamed out of the way, said, and the one before it is taken.
        Raises `ConfigError` for a checkpoint of another model, naming the first differing leaf.
        """
        shapes = self.keying.keyed_shapes(like)
        for step in reversed(self.steps):
            try:
                stored = self._manager.item_metadata(step)["state"]
                if stored is None:
                    raise ValueError("its metadata cannot be read")
                _check_same_model(shapes, stored, self.directory / str(step))
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(shapes), meta=ocp.args.JsonRestore()
                    ),
                )
            except ConfigError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds on damaged files
                aside = self._set_aside(step)
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                say(
                    f"checkpoint {step} is damaged ({reason}): moved to {aside}, "
                    f"trying the one before"
                )
                continue
            return self.keying.staged(restored["state"], like), restored["meta"]
        return None

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / f"damaged-{step}"
        (self.directory / str(step)).rename(aside)
        self._manager.reload()
        return aside


def _check_same_model(expected: Tree, stored: Tree, where: Path) -> None:
    def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
        leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
        return {_name(path): tuple(leaf.shape) for path, leaf in leaves}

    want, have = shapes(expected), shapes(stored)
    for name in sorted({*want, *have}, key=lambda name: (not name.startswith("params"), name)):
        if want.get(name) != have.get(name):
            raise ConfigError(
                f"checkpoint {where} is of another model: {name} has shape "
                f"{have.get(name, 'none (absent)')} there and {want.get(name, 'none (absent)')} in "
                f"this configuration; change [model] back or use another run.dir."
            )


def _name(path: tuple[Any, ...]) -> str:
    """A tree path as `params/layers/17/attn/wq`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
