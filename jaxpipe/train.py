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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError, first_line
from jaxpipe.config.arguments import parse, parser_of, string_override
from jaxpipe.config.paths import any_path, local_path
from jaxpipe.planning.rules.experts import check_recording
from jaxpipe.run import Run
from jaxpipe.runtime import command, position, processes
from jaxpipe.runtime.exit_code import ExitCode


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
        f"train.microbatch_size, train.seq_len or model, train.remat_layers or train.remat=full, "
        f"or more devices; `python -m jaxpipe.plan` counts the bytes."
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
    with Run(config, only_seed=only_seed) as run:
        if only_seed:
            return run.save_seed()
        if record_routes:
            run.record_routes(record_routes)
            return ExitCode.DONE
        return run.loop()


if __name__ == "__main__":
    sys.exit(main())
