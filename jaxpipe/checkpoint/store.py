"""The checkpoints of a run: Orbax directories, which plain Orbax reads on any devices."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from jaxpipe.checkpoint.compatibility import Check
from jaxpipe.checkpoint.integrity import FORMAT, DamagedError, add_checksum
from jaxpipe.checkpoint.keying import StateKeying
from jaxpipe.checkpoint.listing import check_writable, list_steps, list_unfinished, named_by_step
from jaxpipe.checkpoint.movement import movement_of
from jaxpipe.checkpoint.orbax_port.errors import suppress_orbax_errors
from jaxpipe.checkpoint.orbax_port.handler import StateSave
from jaxpipe.checkpoint.orbax_port.manager import open_manager
from jaxpipe.checkpoint.orbax_port.save_barrier import SaveBarrier
from jaxpipe.checkpoint.orbax_port.stores import use_store_of
from jaxpipe.checkpoint.restoring import Meta, Tree, read_state
from jaxpipe.checkpoint.retention import LINEAGE, Retention
from jaxpipe.config import ConfigError
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.errors import (
    as_os_errors,
    is_over,
    passes,
    reason_of,
    remedy_of,
    retry,
    wait,
)
from jaxpipe.runtime.storage.files import AnyPath

if TYPE_CHECKING:
    from jaxpipe.checkpoint.local.saves import LocalSaves

_PAUSE = 5.0  # seconds until what storage did not answer is asked again


class CheckpointStore:
    """The checkpoints of one run: a context manager that waits for pending saves on exit.

    All processes of `group` (by default those of the run) must call its methods in the same order.
    `local` are their local saves. Every save adds the entries of `carried` to its metadata. The
    newest `keep` checkpoints stay on disk, those of steps that are multiples of `keep_every` (0: no
    others), and all that another run has saved there. `check_owner` is called before anything is
    written or removed, and does not return if another run uses the directory. Raises `ConfigError`
    where the directory cannot be written.

    >>> import jax, tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpipe.core.mesh import Sharding, StageLayout, make_mesh
    >>> from jaxpipe.runtime.storage.files import open_path
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
        group: Group | None = None,
    ):
        self.local, self.directory = local, storage.absolute(directory)
        self._check_owner = check_owner
        self.group = group = group or processes.group()
        self.keying = keying
        self.carried: dict[str, Any] = {}
        self._asynchronous, self._say = asynchronous, say
        self._unanswered = self._failing = self._stale = False
        self._last: tuple[int, Tree, Meta] = -1, None, {}
        use_store_of(self.directory)
        suppress_orbax_errors()
        with group.first_before_others("directory of checkpoints"):
            check_writable(self.directory)
            self._remove_unfinished()  # left by a killed process: no other run writes here
        self._barrier = SaveBarrier()
        word = group.from_first("word of the checkpoints", lambda: secrets.token_hex(8))
        self._retention = Retention(self.directory, keep, keep_every, word)
        opened = partial(open_manager, self.directory, self._retention, self._barrier)
        self._manager = retry(opened, str(self.directory), say)
        self._movement = movement_of(self.directory, jax.process_index())

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
        self._tidy_up()  # TensorStore may have written on after a failure

    def wait(self) -> None:
        """Wait until a pending save is on disk, or has failed and its files are removed."""
        with self._log_unwritten(), position.metered(self._movement):
            self._manager.wait_until_finished()
        self._tidy_up()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    @property
    def damaged_directories(self) -> list[AnyPath]:
        """Directories of damaged checkpoints that were renamed."""
        return sorted(self.directory.glob("damaged-*"))

    def is_written(self, step: int) -> bool:
        """Wait for a pending save, then return whether the step is on disk; the same in all.

        While storage does not answer, the last save, whose state must still be there, is repeated
        for a limited time. Raises `ConfigError` in all processes where that does not help.
        """
        started = time.monotonic()
        while True:
            self.wait()
            found, cause = self._is_listed(step)
            written = self.group.any("is a step written", found)
            unanswered = self.group.any("did storage answer", self._unanswered or cause is not None)
            if written or not unanswered:
                return written
            late = self._last[0] != step or is_over(str(self.directory), started)
            if self.group.any("is a save late", late):
                raise ConfigError(
                    f"step {step} is not saved: {self.directory} does not answer: see that this "
                    f"machine reaches it, and start the same command again."
                ) from (cause or TimeoutError())
            wait(_PAUSE)
            self.save(*self._last)

    def _is_listed(self, step: int) -> tuple[bool, Exception | None]:
        """Whether process 0 finds a step, False in others; and the error that keeps it from it."""
        if not self.group.is_first:
            return False, None
        try:
            found = retry(lambda: list_steps(self.directory), str(self.directory), self._say)
        except OSError as error:
            return False, error
        return step in found, None

    def save(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Save a step; if asynchronous, return once the state is copied from the devices.

        `state` is in stage-stacked form; `meta` must be JSON-serialisable. A step that is on disk
        already is not written again. A failure to write is reported and not raised, so training
        continues; earlier checkpoints stay.
        """
        self._last = step, state, meta
        if self._is_known(step):
            return
        self.wait()  # reports a failure of the previous save
        keyed = self.keying.to_keyed(state)
        saved_meta = ocp.args.JsonSave(add_checksum(self._described(step, meta)))
        args = ocp.args.Composite(state=StateSave(keyed), meta=saved_meta)
        with self._log_unwritten(), position.metered(self._movement):
            self._check_all_can_write()
            if step in self.steps:
                return
            self._retention.note_foreign(self.steps, self.group)
            self._barrier.begin()
            self._unanswered = self._failing = False
            self._manager.save(step, args=args)
        if not self._asynchronous:
            self.wait()

    def _is_known(self, step: int) -> bool:
        """Whether all processes know that a step is on disk."""
        return not self.group.any("is a step to be saved", self._stale or step not in self.steps)

    def save_locally(self, step: int, state: Tree, meta: dict[str, Any]) -> None:
        """Save a step as `save` does, but in `local`, where it stays until the next."""
        assert self.local is not None  # as `checkpoint.local_every` is set
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
        with self.group.first_before_others("removal of later steps"):
            if self.group.is_first:
                retry(lambda: self._remove_later(last_step), str(self.directory), self._say)
        retry(self._reload, str(self.directory), self._say)

    def _remove_later(self, last_step: int) -> None:
        for step in list_steps(self.directory):
            if step > last_step:
                storage.remove_tree(self.directory / str(step))

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
        started, is_told = time.monotonic(), False
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
                with position.metered(self._movement):
                    named = named_by_step(check)
                    found = read_state(path, self.keying, like, None, say, named, group=self.group)
                return self._retention.continue_from(found)
            except ConfigError as error:  # in all processes
                late = is_over(str(self.directory), started)
                if self.group.any("is a restore late", late or not passes(error, worked=True)):
                    raise
                if not is_told:
                    say(f"warning: {path} does not answer ({error.__cause__}): it is read again")
                is_told = True
                wait(_PAUSE)
            except DamagedError as error:
                aside = self._set_aside(step)
                say(
                    f"checkpoint {step} is damaged ({error}): moved to {aside}, trying the one "
                    f"before"
                )

    def _set_aside(self, step: int) -> AnyPath:
        def name() -> str:
            names = [f"damaged-{step}", *(f"damaged-{step}-{i}" for i in range(2, 99))]
            with as_os_errors():
                return next(name for name in names if not (self.directory / name).exists())

        found = self.group.from_first(
            "name for a damaged step", lambda: retry(name, str(self.directory), self._say)
        )
        aside = self.directory / found
        with self.group.first_before_others(f"removal of damaged step {step}"):
            if self.group.is_first:
                try:
                    storage.move_tree(self.directory / str(step), aside)
                except OSError as error:
                    raise ConfigError(
                        f"checkpoint {step} is damaged but cannot be moved to {aside} "
                        f"({error.strerror}): move it away."
                    ) from error
        self._reload()
        return aside

    def _remove_unfinished(self) -> None:
        """Remove files of a killed or failed save, which can be as large as the full state."""
        self._check_owner()
        if self.group.is_first:
            for path in list_unfinished(self.directory):
                storage.remove_tree(path)

    def _tidy_up(self) -> None:
        """Remove what is unfinished if storage answers; otherwise the next save does."""
        with contextlib.suppress(OSError):
            self._remove_unfinished()

    def _reload(self) -> None:
        """Let Orbax read again which checkpoints there are."""
        self._stale = True  # unless it can
        with as_os_errors():
            self._manager.reload()
        self._stale = False

    def _check_all_can_write(self) -> None:
        """Raise `OSError` if a process cannot write: Orbax would block for over five minutes."""
        cause: OSError | None = None

        def prepare() -> None:
            storage.probe(self.directory)
            self._remove_unfinished()  # in a store they would become part of this save
            if self._stale:
                self._reload()

        try:
            retry(prepare, str(self.directory), self._say)
        except OSError as error:
            cause = error
        if self.group.any("can all write", cause is not None):
            self._unanswered = self.group.any("does storage answer", passes(cause, worked=True))
            other = ConnectionError if self._unanswered else OSError
            raise cause or other("another process cannot write")

    @contextlib.contextmanager
    def _log_unwritten(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # a failure of a device or another process, not of the disk
        except Exception as error:  # the libraries of stores have no common one
            was_failing, self._failing = self._failing, True
            self._unanswered = passes(error, worked=True)
            if not (was_failing and self._unanswered):
                remedy = remedy_of(error, str(self.directory))
                self._say(
                    f"warning: a checkpoint could not be written ({reason_of(error)}): training "
                    f"goes on, and the checkpoints before it are as they were"
                    f"{remedy and '; '}{remedy}."
                )
            with contextlib.suppress(OSError):  # the next save reads them
                self._reload()  # it forgets the steps that this save would have removed
