"""Instructions of a compiled program, from XLA's text of it."""

import re
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")


class Instruction(NamedTuple):
    """One line of a computation; `rest` is the text after the opening bracket of its operands."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool

    @property
    def names(self) -> list[str]:
        """Names of instructions and computations in `rest`."""
        return _NAME.findall(self.rest)

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it reads."""
        return _NAME.findall(self.rest.split(")")[0])


def parse_instruction(line: str) -> Instruction | None:
    """Parse a line of a computation; None if it is no instruction."""
    if not (match := _INSTRUCTION.match(line)):
        return None
    root, name, shape, opcode, rest = match.groups()
    return Instruction(name, shape, opcode, rest, bool(root))


def parse_computations(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of every computation of a scheduled module, in their order."""
    computations: dict[str, list[Instruction]] = {}
    inside: list[Instruction] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            inside = computations.setdefault(header[2], [])
        elif one := parse_instruction(line):
            inside.append(one)
    return computations
