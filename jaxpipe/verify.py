"""`python -m jaxpipe.verify CONFIG [section.key=value ...]`: check what settings compute.

Shrinks the run (widths, depth, experts, vocabulary, sequences, counts) but keeps its mesh axes,
options, kinds of layers and schedule, and runs it in float64 on virtual CPU devices, with the
program of the devices that the run is for. Losses, gradients, update and metrics of a step, and of
another after a checkpoint is restored on another mesh, are compared with one device, without
pipeline. Prints the largest relative errors, and what could not be checked. Needs no GPU.

With `--self-test` it instead plants faults into the program one by one, and reports which
comparison notices each.

Exit codes: 0 all errors are at most 1e-9 (each fault is noticed); 1 not so; 2 bad input.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.config.arguments import parse, parser_of
from jaxpipe.lab.verification.shrinking import SmallerRun, shrink
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.runtime import command
from jaxpipe.runtime.environment import use_cpu_devices
from jaxpipe.runtime.exit_code import ExitCode

TOLERANCE = 1e-9  # largest relative error; float64 sums in another order differ by about 1e-14


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = parser_of("verify", __doc__ or "")
    parser.add_argument("--self-test", action="store_true", help="plant faults, one by one")
    return command.run(lambda: _run(parse(parser, argv)))


def _run(arguments: argparse.Namespace) -> int:
    config = configs.load(arguments.config, arguments.overrides)
    check_settings(config)
    run = shrink(config)
    check_settings(run.config)
    for line in (*run.changes, *(f"not checked: {what}" for what in run.unchecked)):
        print(line, flush=True)
    _start_devices(run)
    return _self_test(run) if arguments.self_test else _verify(run)


def _start_devices(run: SmallerRun) -> None:
    """Let jax see the run's virtual devices, compute in float64, and compile quickly."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    use_cpu_devices(max(run.config.parallel.devices, 2))
    import jax

    jax.config.update("jax_enable_x64", True)


def _verify(run: SmallerRun) -> int:
    # Needs jax, which reads the environment when it starts.
    from jaxpipe.lab.verification.verifying import Verification

    deviations = Verification(run.config, _say).deviations()
    wrong = [one for one in deviations if not one.error <= TOLERANCE]
    table = Table("compared", "largest relative error", "in")
    for one in deviations:
        table.add_row(one.what, f"{one.error:.1e}", one.name)
    _print(table)
    for one in wrong:
        print(f"error: {one.what} differ by {one.error:.1e} in {one.name}", file=sys.stderr)
    return ExitCode.FAILED if wrong else ExitCode.DONE


def _self_test(run: SmallerRun) -> int:
    from jaxpipe.lab.verification.self_test import plant_all

    table, missed = Table("planted fault", "noticed by", "error", "in"), []
    for fault, worst in plant_all(run.config, _say):
        noticed = not worst.error <= TOLERANCE
        missed += [] if noticed else [fault]
        table.add_row(fault, worst.what if noticed else "NOTHING", f"{worst.error:.1e}", worst.name)
    _print(table)
    for fault in missed:
        print(f"error: nothing notices this fault: {fault}", file=sys.stderr)
    return ExitCode.FAILED if missed else ExitCode.DONE


def _say(line: str) -> None:
    print(line, flush=True)


def _print(table: Table) -> None:
    Console(highlight=False, width=max(100, Console().width)).print(table)


if __name__ == "__main__":
    sys.exit(main())
