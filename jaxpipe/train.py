"""`python -m jaxpipe.train CONFIG [section.key=value ...]`: train, or resume, one run.

The same command resumes a run that was stopped or has finished.

Exit codes: 0 done; 1 stopped at a non-finite loss or gradient or at loss spikes; 2 bad input to
this process or another, out of memory, or run.dir is in use by another run; 3 another process of
the run has exited or never connected; 4 the run ended but its last step could not be saved; 5 the
run hung, with a sentence on the process that is stuck (runtime.hang_timeout); 6 a device computes
wrong numbers (train.corruption_check_every); 7 storage did not answer for 150 seconds; 70 an
unexpected error; 128 + n stopped by signal n (129: SIGHUP, 130: Ctrl-C, 138: SIGUSR1, 143:
SIGTERM), after the step in progress was finished and saved.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.config.arguments import parse, parser_of, string_override
from jaxpipe.config.paths import any_path, is_address, local_path
from jaxpipe.planning import Devices, resolve_on_fewer
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.data import check_data_given
from jaxpipe.planning.rules.experts import check_recording
from jaxpipe.runtime import command, position, processes
from jaxpipe.runtime.arrival import arriving
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import allow_open_files, use_cpu_devices, use_gpu_memory
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage.directory import resolve_links
from jaxpipe.runtime.storage.errors import retry
from jaxpipe.runtime.storage.files import AnyPath, open_path

if TYPE_CHECKING:
    from jaxpipe.checkpoint.local.saves import LocalSaves
    from jaxpipe.data.sources import RunData


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    position.restart()
    position.enter("plan")
    parser = parser_of("train", __doc__ or "")
    parser.add_argument("--print-config", action="store_true", help="print every setting, and exit")
    parser.add_argument("--resume", metavar="auto|none|PATH", help="checkpoint.resume")
    parser.add_argument(
        "--status",
        action=_OfRun,
        type=any_path,
        metavar="RUN_DIR",
        help="print the state of a run from its files, and exit; needs no CONFIG",
    )
    parser.add_argument(
        "--report",
        action=_OfRun,
        type=any_path,
        metavar="RUN_DIR",
        help="write a page of the run's metrics, report.html, into it, and exit; needs no CONFIG",
    )
    parser.add_argument(
        "--seed-checkpoint", action="store_true",
        help="save the initial state, made on one device, as checkpoint 0, and stop",
    )  # fmt: skip
    parser.add_argument(
        "--record-routes", type=local_path, metavar="NPZ",
        help="write the next step's batch with the experts that its tokens go to, and stop",
    )  # fmt: skip
    return command.run(
        lambda: _run(parse(parser, argv)),
        interrupted="interrupted: the same command goes on from the newest checkpoint",
    )


def _run(arguments: argparse.Namespace) -> int:
    overrides = arguments.overrides
    if arguments.resume is not None:
        overrides = [*overrides, string_override("checkpoint.resume", arguments.resume)]
    config = configs.load(arguments.config, overrides)
    if arguments.print_config:
        print(configs.to_toml(config), end="")
        return ExitCode.DONE
    try:
        return train(
            config, only_seed=arguments.seed_checkpoint, record_routes=arguments.record_routes
        )
    except Exception as error:
        if lacking := _lacking_memory(error):
            raise ConfigError(lacking) from error
        raise


class _OfRun(argparse.Action):
    """Reads the files of a run, prints what its option asks for and exits, as `--help` does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
        values: Any, option_string: str | None = None,
    ) -> None:  # fmt: skip
        from jaxpipe.run.watch.report import write_report
        from jaxpipe.run.watch.status import status

        read = {"status": status, "report": write_report}[self.dest]
        print(configs.mask_secrets(read(values)))
        parser.exit()


def _lacking_memory(error: Exception) -> str:
    """Return the out-of-memory advice for the user, or "" if the error is another one."""
    import jax

    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return ""
    return (
        f"the devices have too little memory for this run ({first_line(error)}): use a smaller "
        f"train.microbatch_size, train.seq_len or model, train.remat=full, or more devices; "
        f"`python -m jaxpipe.plan` counts the bytes."
    )


def train(config: Config, *, only_seed: bool = False, record_routes: Path | None = None) -> int:
    """Train as configured and return the exit code.

    Args:
        config: of the run.
        only_seed: initialize the state on one device, save it as checkpoint 0, and stop.
        record_routes: write the next step's batch and its expert routes to this file, and stop.

    Raises:
        ConfigError: the configuration, its data or run.dir cannot be used; nothing was trained.
    """
    if record_routes:
        check_recording(config, processes.started())
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
    position.enter("import")
    # jax must not be imported earlier: it reads the environment set above when it starts.
    import jax

    from jaxpipe.checkpoint import CheckpointStore, StateKeying
    from jaxpipe.checkpoint.hf.serving import ServingFiles
    from jaxpipe.data.warnings import data_warnings
    from jaxpipe.run.agreement import inputs_of_programs, programs_of, results_of
    from jaxpipe.run.exports import Exports
    from jaxpipe.run.history import note_start
    from jaxpipe.run.loop import TrainLoop
    from jaxpipe.run.start import DataPosition, describe, resolve_on_one_device, start
    from jaxpipe.run.watch.loggers import open_loggers
    from jaxpipe.run.watch.metrics import MetricsLog
    from jaxpipe.run.watch.progress import Progress
    from jaxpipe.run.watch.status import recordings
    from jaxpipe.run.watch.summary import summary
    from jaxpipe.runtime.programs.compile_cache import use_compile_cache
    from jaxpipe.runtime.programs.compiler import check_version
    from jaxpipe.runtime.storage.directory import WriteGuard, check_shared, locked
    from jaxpipe.runtime.storage.ownership import Ownership
    from jaxpipe.runtime.storage.spool import Spool, local_folder
    from jaxpipe.runtime.watchdog import Watchdog, place_of
    from jaxpipe.training.routes import record
    from jaxpipe.training.trainer import Trainer

    position.enter("plan")
    directory, messages = local_folder(config.run.dir), []
    processes.check_alike("programs", lambda: programs_of(config))
    check_version(jax.default_backend())
    use_compile_cache(config.runtime.compile_cache, messages.append)
    devices = jax.devices()
    if only_seed:
        devices = devices[:1]
        plan = resolve_on_one_device(config, devices[0])
    else:
        present = Devices.present(
            devices, processes.devices_of_host(), processes.devices_of_process()
        )
        plan, changes = resolve_on_fewer(config, present)
        devices = devices[: plan.devices.count]
        if not processes.go_on_with(devices[-1].process_index + 1, changes):
            return 0
        messages += [changes] if changes else []
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.runtime.hang_timeout))
        lock = stack.enter_context(locked(directory, messages.append))
        if not is_address(config.run.dir):
            check_shared(directory)
        spool = stack.enter_context(Spool(config.run.dir, messages.append))
        owner = stack.enter_context(Ownership(spool, lock))
        stack.enter_context(watchdog.files_in(spool))
        if plan.config.parallel.costs == "measure":
            from jaxpipe.run.measure.measured_costs import measure

            plan, message = measure(plan)
            messages.append(message)
        position.enter("open")
        trainer, config = Trainer(plan, devices, inputs_of_programs(plan)), plan.config
        watchdog.place = place_of(trainer.mesh)
        data = _data(config, directory)
        processes.check_alike("results", lambda: results_of(plan, data))
        if config.train.eval_every:
            data.heldout.batches(
                0, **trainer.sharder.sizes
            ).close()  # raises if there is too little
        shown = Progress(config.train.steps, config.log, silent=not processes.first())
        progress = stack.enter_context(shown)
        checkpoints = stack.enter_context(
            CheckpointStore(
                spool.shared / "checkpoints",
                keep=config.checkpoint.keep,
                keep_every=config.checkpoint.keep_every,
                asynchronous=config.checkpoint.asynchronous,
                keying=StateKeying(trainer.layout, trainer.sharding),
                say=progress.say,
                local=_local_saves(config, spool.shared),
                check_owner=owner.check,
            )
        )
        if only_seed:
            _check_seed(config)
            if checkpoints.steps:
                raise ConfigError(
                    f"{checkpoints.directory} already holds checkpoints of steps "
                    f"{checkpoints.steps}: give another run.dir for a seed."
                )
            state = trainer.init()
            checkpoints.save(0, state.parts(), describe(trainer, data, DataPosition(), state.guard))
            return 0 if checkpoints.is_written(0) else ExitCode.NOT_SAVED
        samples = config.train.steps * config.tokens_per_step // config.train.seq_len
        warnings = data_warnings(data.train, samples)
        for part in (*messages, summary(trainer), *warnings, *recordings(directory)):
            progress.say(part)
        position.enter("restore")
        state, seen = start(trainer, data, checkpoints, progress.say)
        started = {"the step to go on from": str(int(state.step)), "the data position": str(seen)}
        processes.check_alike("start", lambda: started)
        if record_routes:
            record(trainer, data.train, state, seen.position, record_routes)
            return 0
        log = None
        owner.check()
        if processes.first():
            step = int(state.step)
            guard = WriteGuard(progress.say)
            note_start(config, step, guard)
            shown_on = open_loggers(config, step, guard)
            how = {"loggers": shown_on, "guard": guard, "check_owner": owner.check_again}
            log = MetricsLog(directory, last_step=step, **how)
            stack.enter_context(log)
        exports = stack.enter_context(Exports(config, progress.say))
        tasks = None
        if config.train.evaluate_every:
            from jaxpipe.inference.tasks import RunTasks

            tasks = RunTasks.open(trainer, ServingFiles.from_meta(checkpoints.carried))
        training = TrainLoop(trainer, data, checkpoints, progress, log, exports, tasks, spool)
        return training.loop(state, seen)


def _check_seed(config: Config) -> None:
    """Raise `ConfigError` where a run would start from other values than initial ones."""
    resume, adapter = config.checkpoint.resume, config.lora.adapter
    given = "" if resume in ("auto", "none") else f"checkpoint.resume={resume!r}"
    if given := given or (adapter and f"lora.adapter={adapter!r}"):
        raise ConfigError(
            f"--seed-checkpoint with {given}: it saves a new state, from which the run would then "
            f"start; leave one of them out."
        )


def _local_saves(config: Config, directory: AnyPath) -> "LocalSaves | None":
    """The local saves of the run in this directory; None if it makes none."""
    if not config.checkpoint.local_every:
        return None
    from jaxpipe.checkpoint.local.saves import LocalSaves, run_word

    return LocalSaves(Path(config.checkpoint.local_dir), run_word(directory))


def _data(config: Config, directory: Path) -> "RunData":
    """Open the run's data; the first process prepares it before the others where needed."""
    from jaxpipe.data.sources import fetch_data, open_data

    if config.train.loss_rows:
        raise ConfigError(
            f"train.loss_rows={list(config.train.loss_rows)} are in no data that this command "
            f"reads: call `Trainer` from Python (jaxpipe/training/TRAIN_ON_YOUR_LOSS.md)."
        )
    try:
        fetch_data(config.data)  # on all hosts at once, each into its own cache
        with processes.first_before_others("data"):
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


if __name__ == "__main__":
    sys.exit(main())
