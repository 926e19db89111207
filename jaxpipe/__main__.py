"""`jaxpipe COMMAND ...`, which is `python -m jaxpipe.COMMAND ...`: each command has its own --help.

`--example NAME` stands for the path of an example configuration:

    jaxpipe train --example quickstart train.steps=50
"""

import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

COMMANDS = (
    "train", "plan", "data", "checkpoint", "generate", "score", "evaluate", "verify", "bench",
    "profile",
)  # fmt: skip
EXAMPLES = Path(__file__).parent / "examples"


def main() -> int:
    """Run the command that `sys.argv` names; return 2 for an unknown command or example."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(f"{__doc__}\nCommands: {', '.join(COMMANDS)}.")
        return 0
    if command not in COMMANDS:
        return _refuse(f"no command {command!r}", COMMANDS)
    while "--example" in arguments:
        index = arguments.index("--example")
        (name,) = arguments[index + 1 : index + 2] or [""]
        examples = {path.stem: str(path) for path in sorted(EXAMPLES.glob("*.toml"))}
        if name not in examples:
            return _refuse(f"no example {name!r}", examples)
        arguments[index : index + 2] = [examples[name]]
    sys.argv[1:] = arguments
    runpy.run_module(f"jaxpipe.{command}", run_name="__main__", alter_sys=True)
    return 0


def _refuse(what: str, names: Iterable[str]) -> int:
    print(f"error: {what}; there are {', '.join(names)}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
