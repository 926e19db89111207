"""The parts of a run that `Run` opens, in its order, after jax has started."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.local.saves import LocalSaves, run_word
from jaxpipe.config import Config, ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.data.sources import RunData, fetch_data, open_data
from jaxpipe.data.warnings import data_warnings
from jaxpipe.planning import Devices, RunPlan, resolve_on_fewer
from jaxpipe.run.agreement import inputs_of_programs, programs_of, results_of
from jaxpipe.run.exports import Exports
from jaxpipe.run.history import note_start
from jaxpipe.run.loop import TrainLoop
from jaxpipe.run.measure.measured_costs import measure
from jaxpipe.run.start import DataPosition, resolve_on_one_device, start
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.progress import Progress
from jaxpipe.run.watch.status import recordings
from jaxpipe.run.watch.summary import summary
from jaxpipe.runtime import position, processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.compile_cache import use_compile_cache
from jaxpipe.runtime.programs.compiler import check_version
from jaxpipe.runtime.storage.directory import WriteGuard, check_shared, locked
from jaxpipe.runtime.storage.errors import retry
from jaxpipe.runtime.storage.files import AnyPath
from jaxpipe.runtime.storage.ownership import Ownership
from jaxpipe.runtime.storage.spool import Spool, local_folder
from jaxpipe.runtime.watchdog import Watchdog, place_of
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Say = Callable[[str], None]


class Files(NamedTuple):
    """The run directory, which this run holds: its folder on this machine, and who shares it."""

    directory: Path
    spool: Spool
    owner: Ownership
    watchdog: Watchdog
    group: Group


class Training(NamedTuple):
    """What a run trains with: all but the state."""

    trainer: Trainer
    data: RunData
    progress: Progress
    checkpoints: CheckpointStore


def plan(
    config: Config, say: Say, group: Group, *, only_seed: bool = False
) -> tuple[RunPlan, list[jax.Device]] | None:
    """The plan of a run and its devices; None in a process that it does not need."""
    group.check_alike("programs", lambda: programs_of(config))
    check_version(jax.default_backend())
    use_compile_cache(config.runtime.compile_cache, say)
    devices = jax.devices()
    if only_seed:
        return resolve_on_one_device(config, devices[0]), devices[:1]
    present = Devices.present(devices, processes.devices_of_host(), processes.devices_of_process())
    planned, changes = resolve_on_fewer(config, present)
    devices = devices[: planned.devices.count]
    if not processes.go_on_with(devices[-1].process_index + 1, changes):
        return None
    if changes:
        say(changes)
    return planned, devices


@contextlib.contextmanager
def open_files(config: Config, say: Say, group: Group) -> Iterator[Files]:
    """Hold the run directory, watched for hangs, while the body runs."""
    directory = local_folder(config.run.dir)
    with (
        Watchdog(config.runtime.hang_timeout, group) as watchdog,
        locked(directory, say, group) as lock,
    ):
        if not is_address(config.run.dir):
            check_shared(directory, group)
        with (
            Spool(config.run.dir, say, group) as spool,
            Ownership(spool, lock, group) as owner,
            watchdog.files_in(spool),
        ):
            yield Files(directory, spool, owner, watchdog, group)


@contextlib.contextmanager
def open_training(
    plan: RunPlan, devices: Sequence[jax.Device], files: Files, say: Say
) -> Iterator[Training]:
    """Open trainer, data, progress and checkpoints; saves are complete when the body has ended."""
    group = files.group
    if plan.config.parallel.costs == "measure":
        plan, message = measure(plan, group)
        say(message)
    position.enter("open")
    trainer, config = Trainer(plan, devices, inputs_of_programs(plan)), plan.config
    files.watchdog.place = place_of(trainer.mesh)
    data = open_run_data(config, files.directory, group)
    group.check_alike("results", lambda: results_of(plan, data))
    if config.train.eval_every:  # opening raises if there is too little
        data.heldout.batches(0, **trainer.sharder.sizes).close()
    silent = not group.is_first
    with (
        Progress(config.train.steps, config.log, silent=silent) as progress,
        CheckpointStore(
            files.spool.shared / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
            keying=StateKeying(trainer.layout, trainer.sharding),
            say=progress.say,
            local=_local_saves(config, files.spool.shared, group),
            check_owner=files.owner.check,
            group=group,
        ) as checkpoints,
    ):
        yield Training(trainer, data, progress, checkpoints)


def open_run_data(config: Config, directory: Path, group: Group) -> RunData:
    """Open the run's data; the first process prepares it before the others where needed."""
    if config.train.loss_rows:
        raise ConfigError(
            f"train.loss_rows={list(config.train.loss_rows)} are in no data that this command "
            f"reads: call `Trainer` from Python (jaxpipe/training/TRAIN_ON_YOUR_LOSS.md)."
        )
    try:
        fetch_data(config.data)  # on all hosts at once, each into its own cache
        with group.first_before_others("data"):
            return retry(
                lambda: open_data(
                    config.data,
                    seq_len=config.train.seq_len,
                    vocab_size=config.model.vocab_size,
                    seed=config.train.seed,
                    directory=directory / "data",
                    variable_length=config.train.variable_length,
                    answers=tuple(config.loss_rows) if config.reads_pairs else (),
                ),
                "the data",
                worked=False,
            )
    except OSError as error:
        raise ConfigError(
            f"the data cannot be read ({error}): make the file readable, or choose another "
            f"data.path."
        ) from error


def _local_saves(config: Config, directory: AnyPath, group: Group) -> LocalSaves | None:
    """The local saves of the run in this directory; None if it makes none."""
    if not config.checkpoint.local_every:
        return None
    return LocalSaves(Path(config.checkpoint.local_dir), run_word(directory, group), group)


def restore(
    training: Training, files: Files, messages: Sequence[str]
) -> tuple[State, DataPosition]:
    """The state and the data position to continue from; logs the start."""
    trainer, data, progress, checkpoints = training
    config = trainer.config
    samples = config.train.steps * config.tokens_per_step // config.train.seq_len
    warnings = data_warnings(data.train, samples)
    for part in (*messages, summary(trainer), *warnings, *recordings(files.directory)):
        progress.say(part)
    position.enter("restore")
    state, seen = start(trainer, data, checkpoints, progress.say)
    started = {"the step to go on from": str(int(state.step)), "the data position": str(seen)}
    files.group.check_alike("start", lambda: started)
    return state, seen


@contextlib.contextmanager
def open_loop(training: Training, files: Files, step: int) -> Iterator[TrainLoop]:
    """Open the logs, from this step on, the exports and the tasks of a loop."""
    trainer, data, progress, checkpoints = training
    config, log = trainer.config, None
    files.owner.check()
    with contextlib.ExitStack() as stack:
        if files.group.is_first:
            guard = WriteGuard(progress.say)
            note_start(config, step, guard)
            shown_on = open_loggers(config, step, guard)
            log = MetricsLog(
                files.directory, last_step=step, loggers=shown_on, guard=guard,
                check_owner=files.owner.check_again,
            )  # fmt: skip
            stack.enter_context(log)
        exports = stack.enter_context(Exports(config, progress.say))
        tasks = None
        if config.train.evaluate_every:
            from jaxpipe.inference.tasks import RunTasks  # needs lm-eval, an extra

            tasks = RunTasks.open(trainer, ServingFiles.from_meta(checkpoints.carried))
        yield TrainLoop(
            trainer, data, checkpoints, progress, log, files.group, exports, tasks, files.spool
        )
