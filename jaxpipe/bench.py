"""`python -m jaxpipe.bench WHAT ...`: measure, and compare with the simulator and with PyTorch.

  ops CONFIG     seconds, FLOPs and rates of every op on the present device;
                 with --table instead of CONFIG the rates of the device, for any plan
  correct CONFIG errors of F, B and W in bfloat16 and fp8, relative to float32
  train CONFIG   training steps on the present devices
  report         every measurement for one GPU, as launch/gpu_report.sh runs it
  step CONFIG    training steps of every schedule on two CPU cores, compared with PyTorch
  clockwork      the executor over layers that sleep, compared with the simulator and PyTorch

Exit codes: 0 done; 1 a measurement failed; 2 bad input.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from jaxpipe.config.arguments import Parser, parse_commands
from jaxpipe.lab.bench import clockwork, correct, ops, report, step, train
from jaxpipe.lab.bench.processes import BenchError
from jaxpipe.runtime import command

_COMMANDS = {
    "ops": ops,
    "correct": correct,
    "train": train,
    "report": report,
    "step": step,
    "clockwork": clockwork,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv

    def run() -> int | None:
        arguments = _parse_arguments(argv)
        arguments.line = shlex.join(["python", "-m", "jaxpipe.bench", *argv])
        return _COMMANDS[arguments.command].run(arguments)

    return command.run(run, (BenchError,))


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m jaxpipe.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(
                name,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parse_commands(parser, argv, "overrides")


if __name__ == "__main__":
    sys.exit(main())
