"""A training run from its configuration to its exit code, for commands and for Python.

The order of the start, and its reasons:

1. Devices. jax and XLA read the environment when they start, so it is set before jax is imported.
   Processes meet before a device is used, and nothing else can be compared or waited for earlier.
2. Plan. Processes compare versions and settings before they share anything. Those that the run
   does not need leave before one of them holds a lock that a smaller run would wait for.
3. Files. The watchdog begins first, since everything after it may hang. The lock comes before
   anything is written, the copy of a directory in a store (`Spool`) before anything is read there,
   and the claim to the directory (`Ownership`) before a process reports its position, by which
   another start would be recognised.
4. Training: trainer, data and checkpoints. Results are compared once data and tables are known.
   Checkpoints come last, since a run that is refused must not have changed the directory.
5. Loop: the state is restored, and only then it is known from which step logs go on.
"""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.data import check_data_given
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.arrival import arriving
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import allow_open_files, use_cpu_devices, use_gpu_memory
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage.directory import resolve_links
from jaxpipe.runtime.storage.files import open_path

if TYPE_CHECKING:
    from jaxpipe.run.contexts import Files, Training
    from jaxpipe.run.start import DataPosition
    from jaxpipe.training.state import State


class Run:
    """A training run; a context manager that holds the run directory while its body runs.

    All processes of the run enter it, and call the same methods. Before it is entered jax must not
    have been used.

    Args:
      config: of the run.
      only_seed: make the state on one device, for `save_seed`, whatever mesh the run has.

    Attributes:
      config: of the run; once it is entered with everything resolved.
      is_needed: whether this process takes part: a run of fewer devices may leave some out
        (`runtime.min_devices`). Where it is false there is no `training`.
      files: the run directory.
      training: trainer, data, progress and checkpoints.

    Raises:
      ConfigError: on entering, if the configuration, its data or run.dir cannot be used.
    """

    files: "Files"
    training: "Training"

    def __init__(self, config: Config, *, only_seed: bool = False):
        self.config, self.is_needed = config, True
        self._only_seed = only_seed
        self._messages: list[str] = []  # of the start, until there is a log
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        self.config = _start_devices(self.config, only_seed=self._only_seed)
        position.enter("import")
        from jaxpipe.run import contexts  # imports jax

        position.enter("plan")
        say, group = self._messages.append, processes.group()
        planned = contexts.plan(self.config, say, group, only_seed=self._only_seed)
        if planned is None:
            self.is_needed = False
            return self
        with contextlib.ExitStack() as stack:
            self.files = stack.enter_context(contexts.open_files(self.config, say, group))
            opened = contexts.open_training(*planned, self.files, say)
            self.training = stack.enter_context(opened)
            self.config = self.training.trainer.config
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._stack.__exit__(kind, error, traceback)

    def restore(self) -> "tuple[State, DataPosition]":
        """The state and the data position to continue from (`start.start`); logs the start."""
        from jaxpipe.run import contexts

        return contexts.restore(self.training, self.files, self._messages)

    def loop(self) -> int:
        """Train from the newest checkpoint to the end, with logs and saves; return the exit code.

        The code is `DONE` in a process that is not needed.
        """
        if not self.is_needed:
            return ExitCode.DONE
        from jaxpipe.run import contexts

        state, seen = self.restore()
        with contexts.open_loop(self.training, self.files, int(state.step)) as loop:
            return loop.loop(state, seen)

    def record_routes(self, path: Path) -> None:
        """Write the next step's batch with the experts that its tokens go to."""
        from jaxpipe.training.routes import record

        trainer, data = self.training.trainer, self.training.data
        state, seen = self.restore()
        record(trainer, data.train, state, seen.position, path)

    def save_seed(self) -> int:
        """Save the initial state as checkpoint 0; return the exit code.

        Raises:
          ConfigError: the run has checkpoints, or starts from other values than initial ones.
        """
        from jaxpipe.run.start import DataPosition, describe

        trainer, checkpoints = self.training.trainer, self.training.checkpoints
        _check_seed(self.config)
        if checkpoints.steps:
            raise ConfigError(
                f"{checkpoints.directory} already holds checkpoints of steps {checkpoints.steps}: "
                f"give another run.dir for a seed."
            )
        state = trainer.init()
        meta = describe(trainer, self.training.data, DataPosition(), state.guard)
        checkpoints.save(0, state.parts(), meta)
        return ExitCode.DONE if checkpoints.is_written(0) else ExitCode.NOT_SAVED


def _start_devices(config: Config, *, only_seed: bool) -> Config:
    """Check the settings, start devices and meet the other processes; return the settings."""
    if only_seed and processes.started() > 1:
        raise ConfigError(
            f"--seed-checkpoint in {processes.started()} processes: one device makes the state, so "
            f"start one process for it, and then the run in all of them."
        )
    check_settings(config)
    check_data_given(config)
    config = resolve_links(config)
    position.enter("devices")
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    use_gpu_memory()
    allow_open_files()
    with arriving(open_path(config.run.dir)):
        processes.join()
    check_devices()
    return config


def _check_seed(config: Config) -> None:
    """Raise `ConfigError` where a run would start from other values than initial ones."""
    resume, adapter = config.checkpoint.resume, config.lora.adapter
    given = "" if resume in ("auto", "none") else f"checkpoint.resume={resume!r}"
    if given := given or (adapter and f"lora.adapter={adapter!r}"):
        raise ConfigError(
            f"--seed-checkpoint with {given}: it saves a new state, from which the run would then "
            f"start; leave one of them out."
        )
