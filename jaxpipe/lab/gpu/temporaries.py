"""Find the largest arrays that are live at a step's memory peak, and the lines that created them.

Four of XLA's dumps are read: the live ranges of values, their memory assignment, the instruction
that produces each value, and its source line. Values with the same memory offset and touching live
ranges are one array under several names, such as an accumulator that enters and leaves a loop.
"""

import re
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from jaxpipe.runtime.programs.hlo import Instruction, parse_instruction

_LIVE, _PLACES, _VALUES, _PROGRAM = (
    f"*gpu_after_optimizations{name}.txt"
    for name in ("-live-range", "-buffer-assignment", "-buffer-assignment-values", "")
)
_ALIVE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+): (.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?.*?> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_FROM = re.compile(r"^ from instruction: (.*)$", re.MULTILINE)
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_ROW = re.compile(r"^(\d+) (.*)$")
_PASSES_ON = ("parameter", "while", "conditional", "tuple", "get-tuple-element", "bitcast", "copy")
_PACKAGE = "jaxpipe/"


class Temporary(NamedTuple):
    """An array that is live at the peak.

    Attributes:
      size: in bytes.
      shape: dtype and dims, such as `bf16[8,4096]`.
      made_by: name of the instruction that produced it.
      line: `jaxpipe/FILE:LINE` of the source; "" where XLA kept none.
    """

    size: int
    shape: str
    made_by: str
    line: str


def read_temporaries(folder: Path) -> tuple[Temporary, ...]:
    """Return the arrays live at the peak, largest first; empty if one of XLA's dumps is missing.

    Arguments of the step, and results that alias them, are not included.
    """
    texts = [next(iter(folder.glob(name)), None) for name in (_LIVE, _PLACES, _VALUES, _PROGRAM)]
    return () if None in texts else live_at_peak(*(path.read_text() for path in texts))


def live_at_peak(live: str, places: str, values: str, program: str) -> tuple[Temporary, ...]:
    """Return the arrays live at the peak from the texts of the four dumps.

    The peak is the moment at which the occupied memory is largest. XLA's own peak, in the first
    dump, adds up all live values, even if they share memory.
    """
    lines = SourceLines(program)
    alive = {(name, at): (int(a), int(b)) for name, at, a, b in _ALIVE.findall(live)}
    taken: dict[tuple[str, int], list[_Value]] = defaultdict(list)
    allocation, temporary = "", False
    for line in places.splitlines():
        if header := _ALLOCATION.match(line):
            allocation, temporary = header[1], "preallocated-temp" in header[2]
        elif temporary and (value := _VALUE.match(line)):
            name, index, size, offset, shape = value.groups()
            if when := alive.get((name, index or "")):
                one = _Value(*when, int(size), name, shape.partition("{")[0])
                taken[allocation, int(offset)].append(one)
    uses = [use for here in taken.values() for use in _group_uses(here)]
    peak = _find_peak(uses)
    every = map(parse_instruction, (f"  {line}" for line in _FROM.findall(values)))
    named = {one.name: one for one in every if one}
    at_once = [use.values for use in uses if use.begin <= peak <= use.end]
    arrays = [
        _describe_array([(v.size, v.name, v.shape) for v in here], named, lines) for here in at_once
    ]
    return tuple(sorted(arrays, key=lambda one: -one.size))


class _Value(NamedTuple):
    """A value: first and last moment of its live range, bytes, name and shape."""

    begin: int
    end: int
    size: int
    name: str
    shape: str


class _Use(NamedTuple):
    """Values that occupy the same memory in succession, with no moment between them."""

    begin: int
    end: int
    values: list[_Value]


def _group_uses(values: list[_Value]) -> list[_Use]:
    uses: list[_Use] = []
    for value in sorted(values):
        if uses and value.begin <= uses[-1].end:
            last = uses.pop()
            uses.append(_Use(last.begin, max(last.end, value.end), [*last.values, value]))
        else:
            uses.append(_Use(value.begin, value.end, [value]))
    return uses


def _find_peak(uses: list[_Use]) -> int:
    """Return the first moment at which live values occupy the most bytes."""
    changes: Counter[int] = Counter()
    for use in uses:
        size = max(value.size for value in use.values)
        changes[use.begin] += size
        changes[use.end + 1] -= size
    moments = sorted(changes)
    held = list(accumulate(changes[moment] for moment in moments))
    return moments[held.index(max(held))] if moments else 0


def _describe_array(
    values: list[tuple[int, str, str]], named: dict[str, Instruction], lines: "SourceLines"
) -> Temporary:
    """Describe the array of values in one place by the first computed value with a source line."""

    def rank(value: tuple[int, str, str]) -> tuple[bool, bool]:
        one = named.get(value[1])
        return one is None or one.opcode in _PASSES_ON, not (one and lines.of(one))

    size, name, shape = min(values, key=rank)
    return Temporary(size, shape, name, lines.of(named[name]) if name in named else "")


class SourceLines:
    """Maps instructions to source lines of the project, by the tables at the head of the HLO."""

    def __init__(self, text: str):
        self._files, locations, frames = (
            _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")
        )
        self._locations = {key: _numbers(row) for key, row in locations.items()}
        self._frames = {key: _numbers(row) for key, row in frames.items()}

    def of(self, one: Instruction) -> str:
        """Return the innermost source line in the project of an instruction; "" if unknown."""
        if source := _SOURCE.search(one.rest):
            return _within(source[1], int(source[2]))
        frame = int(match[1]) if (match := _FRAME.search(one.rest)) else 0
        while frame in self._frames:
            row = self._frames[frame]
            place = self._locations.get(row.get("file_location_id", 0), {})
            file = self._files.get(place.get("file_name_id", 0), "").strip('"')
            if _PACKAGE in file:
                return _within(file, place["line"])
            above = row.get("parent_frame_id", frame)
            frame = above if above < frame else 0
        return ""


def _within(file: str, line: int) -> str:
    return f"{_PACKAGE}{file.rpartition(_PACKAGE)[2]}:{line}"


def _table(text: str, name: str) -> dict[int, str]:
    """Return the rows of a table in the HLO's head, by number."""
    _, _, rest = text.partition(f"\n{name}\n")
    rows = {}
    for line in rest.splitlines():
        if not (row := _ROW.match(line)):
            break
        rows[int(row[1])] = row[2]
    return rows


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
