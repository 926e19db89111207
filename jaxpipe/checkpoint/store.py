"""The checkpoints of a run: Orbax directories, which plain Orbax reads on any devices."""

import contextlib
import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from jaxpipe.checkpoint.handler import StateSave, make_state_handler
from jaxpipe.checkpoint.integrity import FORMAT, DamagedError, add_checksum
from jaxpipe.checkpoint.keying import StateKeying
from jaxpipe.checkpoint.listing import list_steps, list_unfinished, named_by_step
from jaxpipe.checkpoint.orbax_errors import suppress_orbax_errors
from jaxpipe.checkpoint.orbax_stores import use_store_of
from jaxpipe.checkpoint.restoring import Check, Meta, Tree, read_state
from jaxpipe.checkpoint.retention import LINEAGE, Retention
from jaxpipe.checkpoint.save_barrier import Manager, SaveBarrier
from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import processes, storage
from jaxpipe.runtime.storage import AnyPath

if TYPE_CHECKING:
    from jaxpipe.checkpoint.local_saves import LocalSaves


class CheckpointStore:
    """The checkpoints of one run: a context manager that waits for pending saves on exit.

    All processes of a run must call its methods in the same order. `local` are its local saves.
    Every save adds the entries of `carried` to its metadata. The newest `keep` checkpoints stay on
    disk, those of steps that are multiples of `keep_every` (0: no others), and all that another run
    has saved there. `check_owner` is called before anything is written or removed, and does not
    return if another run uses the directory. Raises `ConfigError` where it cannot be written.

    >>> import jax, tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpipe.parallel import Sharding, StageLayout, make_mesh
    >>> from jaxpipe.runtime.storage import open_path
    >>> layout, mesh = StageLayout((2,)), make_mesh(pp=1, devices=jax.devices()[:1])
    >>> layers = layout.stack([{"up": jnp.ones(8)}] * 2)
    >>> params = {"embed_head": {"norm": jnp.ones(4)}, "layers": layers}
    >>> sharding = Sharding(mesh)
    >>> params = jax.device_put(params, sharding.named_shardings(params))
    >>> how = {"keep": 2, "asynchronous": False, "keying": StateKeying(layout, sharding)}
    >>> with (
    ...     tempfile.TemporaryDirectory() as directory,
    ...     CheckpointStore(open_path(directory), **how) as checkpoints,
    ... ):
    ...     checkpoints.save(7, {"params": params}, {"position": 56})
    ...     state, meta = checkpoints.restore({"params": params}, say=print)
    >>> meta["position"], state["params"]["layers"][1]["up"].shape
    (56, (1, 8))
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool,
        keying: StateKeying,
        say: Callable[[str], None] = print,
        local: "LocalSaves | None" = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        self.local, self.directory = local, storage.absolute(directory)
        self._check_owner = check_owner
        self.keying = keying
        self.carried: dict[str, Any] = {}
        self._asynchronous, self._say = asynchronous, say
        use_store_of(self.directory)
        suppress_orbax_errors()
        with processes.first_before_others("checkpoints"):
            _check_writable(self.directory)
            self._remove_unfinished()  # left by a killed process: no other run writes here
        # With `active_processes` Orbax synchronizes them by the coordination service. Its device
        # collective would run among the collectives of the steps.
        active = set(range(jax.process_count())) if jax.process_count() > 1 else None
        self._barrier = SaveBarrier()
        word = processes.from_first("lineage", lambda: secrets.token_hex(8))
        self._retention = Retention(self.directory, keep, keep_every, word)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier if active else None),
            create=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=active),
        )
        self._manager = Manager(
            self.directory,
            options=options,
            item_handlers={"state": make_state_handler(), "meta": ocp.JsonCheckpointHandler()},
        )

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None and processes.started() > 1:
            return  # another process may be gone, and finishing a save would wait forever
        self.wait()
        if self.local:
            self.local.close(self._say)
        with self._log_unwritten():
            self._manager.close()
        self._remove_unfinished()  # TensorStore may have written on after a failure

    def wait(self) -> None:
        """Wait until a pending save is on disk, or has failed and its files are removed."""
        with self._log_unwritten():
            self._manager.wait_until_finished()
        self._remove_unfinished()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    @property
    def damaged_directories(self) -> list[AnyPath]:
        """Directories of damaged checkpoints that were renamed."""
        return sorted(self.directory.glob("damaged-*"))

    def is_written(self, step: int) -> bool:
        """Wait for a pending save, then return whether the step is on disk."""
        self.wait()
        return step in list_steps(self.directory)

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Save a step; if asynchronous, return once the state is copied from the devices.

        `state` is in stage-stacked form; `meta` must be JSON-serialisable. A step that is on disk
        already is not written again. A failure to write is reported and not raised, so training
        continues; earlier checkpoints stay.
        """
        if step in self.steps:
            return
        self.wait()  # reports a failure of the previous save
        keyed = self.keying.to_keyed(state)
        saved_meta = ocp.args.JsonSave(add_checksum(self._described(step, meta)))
        args = ocp.args.Composite(state=StateSave(keyed), meta=saved_meta)
        with self._log_unwritten():
            self._check_all_can_write()
            self._retention.note_foreign(self.steps)
            self._barrier.begin()
            self._manager.save(step, args=args)
        if not self._asynchronous:
            self.wait()

    def save_locally(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Save a step as `save` does, but in `local`, where it stays until the next."""
        self.local.save(step, self.keying.to_keyed(state), self._described(step, meta), self._say)

    def clear_local(self) -> None:
        """Remove all saves of `local`: a run must not go on from them."""
        if self.local:
            self.local.clear(self._say)

    def _described(self, step: int, meta: dict[str, Any]) -> dict[str, Any]:
        known = {"format": FORMAT, "step": step, LINEAGE: self._retention.lineage}
        return meta | self.carried | known

    def remove_after(self, last_step: int) -> None:
        """Remove the checkpoints of steps after `last_step`, from which the run goes on."""
        self.wait()
        self.clear_local()
        for step in self.steps:
            if step > last_step:
                self._manager.delete(step)

    def restore(
        self, like: Tree, say: Callable[[str], None], check: Check | None = None,
        last_step: int | None = None,
    ) -> tuple[Tree, Meta] | None:  # fmt: skip
        """Restore the newest undamaged checkpoint, or a local save that is not older.

        Returns `(state, meta)` with the state in the form of `like`, a state in stage-stacked form
        or its shapes; None if there is no checkpoint. `check` gets the path and the metadata before
        any array is read. With `last_step` neither local saves nor later steps are restored.

        A checkpoint that is proved to be damaged is renamed and reported, and the previous one is
        tried. Raises `ConfigError`, and changes nothing on disk, where a checkpoint is of another
        model (the message names the first array that differs) or cannot be read for another reason.
        """
        while True:
            steps = [step for step in self.steps if last_step is None or step <= last_step]
            step = max(steps, default=0)
            local = self.local if last_step is None else None
            if local and (found := local.restore(step, self.keying, like, say, check)):
                return self._retention.continue_from(found)
            if not steps:
                return None
            try:
                path = self.directory / str(step)
                found = read_state(path, self.keying, like, say=say, check=named_by_step(check))
                return self._retention.continue_from(found)
            except DamagedError as error:
                aside = self._set_aside(step)
                say(
                    f"checkpoint {step} is damaged ({error}): moved to {aside}, trying the one "
                    f"before"
                )

    def _set_aside(self, step: int) -> AnyPath:
        names = itertools.chain([f"damaged-{step}"], (f"damaged-{step}-{i}" for i in range(2, 99)))
        aside = next(path for name in names if not (path := self.directory / name).exists())
        processes.largest(0)  # barrier: all choose the same name before the first renames
        with processes.first_before_others(f"damaged {step}"):
            if processes.first():
                try:
                    storage.move_tree(self.directory / str(step), aside)
                except OSError as error:
                    raise ConfigError(
                        f"checkpoint {step} is damaged but cannot be moved to {aside} "
                        f"({error.strerror}): move it away."
                    ) from error
        self._manager.reload()
        return aside

    def _remove_unfinished(self) -> None:
        """Remove files of a killed or failed save, which can be as large as the full state."""
        self._check_owner()
        if processes.first():
            for path in list_unfinished(self.directory):
                storage.remove_tree(path)

    def _check_all_can_write(self) -> None:
        """Raise `OSError` if a process cannot write: Orbax would block for over five minutes."""
        reason = ""
        try:
            storage.probe(self.directory)
        except OSError as error:
            reason = error.strerror or first_line(error)
        if processes.largest(int(bool(reason))):
            raise OSError(reason or "another process cannot write")

    @contextlib.contextmanager
    def _log_unwritten(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # a failure of a device or another process, not of the disk
        except (OSError, ValueError, RuntimeError) as error:
            self._say(
                f"warning: a checkpoint could not be written ({_short_reason(error)}): training "
                f"goes on, and the checkpoints before it are as they were; make room in "
                f"{self.directory}, or make it writable."
            )
            self._manager.reload()  # it forgets the steps that this save would have removed


def _short_reason(error: Exception) -> str:
    """The operating system's message if TensorStore quotes it, otherwise the first line."""
    quoted = re.search(r"([^:]+) \[os_error_code=", str(error))
    return quoted[1].strip() if quoted else first_line(error)


def _check_writable(directory: AnyPath) -> None:
    try:
        storage.probe(directory)
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be written to {directory} ({error.strerror}): make it a writable "
            f"directory or choose another run.dir."
        ) from error
