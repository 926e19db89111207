"""Facts about a compiled step, as pure functions of XLA's text dumps.

Two texts are read. The scheduled HLO has all instructions in the order of execution; "the loop"
here is the scan over ticks, which is the loop with the largest body. The thunk dump lists what the
host launches; the thunks under a `kCommandBuffer` are one CUDA graph.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from jaxpipe.runtime.programs.hlo import Instruction, parse_computations

_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
_THUNK = re.compile(r"^( *)\d+: (k\w+)")
_LABEL = re.compile(r"^(?: *No thunks\.)?( *)(\w+):$")
_HOST = "S(5)"  # memory space of arrays on the host, in an HLO layout
_MOVES = ("fusion", "copy", "dynamic-slice", "dynamic-update-slice")
_PRODUCT = 'custom_call_target="__cu'  # calls of cuBLAS and cuDNN
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
RUNS = ("while", "conditional", "call")  # opcodes whose computations launch their instructions
_CLONE = "double_buffer_clone"


class DeviceCopy(NamedTuple):
    """Copies of one shape in the loop, each at most once a tick; `size` is bytes of one copy."""

    shape: str
    size: int
    count: int


def shape_bytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape.

    >>> shape_bytes("(bf16[2,3]{1,0}, pred[4]{0}, f32[])")
    20
    """
    return sum(
        _count_elements(dims) * (8 if dtype == "pred" else int(_BITS.search(dtype)[0])) // 8
        for dtype, dims in _SHAPE.findall(shape)
    )


def shape_dims(shape: str) -> tuple[int, ...]:
    """Return the dims of the first array in a shape.

    >>> shape_dims("(bf16[2,3]{1,0}, s8[32]{0})")
    (2, 3)
    """
    match = _SHAPE.search(shape)
    return tuple(map(int, filter(None, match[2].split(",")))) if match else ()


def shape_elements(shape: str) -> list[str]:
    """Return the arrays of a shape without their layouts.

    >>> shape_elements("(bf16[2,3]{1,0}, s8[32]{0})")
    ['bf16[2,3]', 's8[32]']
    """
    return [f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(shape)]


def _count_elements(dims: str) -> int:
    return prod(map(int, filter(None, dims.split(","))))


@dataclass(frozen=True)
class Program:
    """A scheduled HLO module as text."""

    text: str

    @cached_property
    def computations(self) -> dict[str, list[Instruction]]:
        """Instructions of every computation, in the order in which they run."""
        return parse_computations(self.text)

    @cached_property
    def loop(self) -> str | None:
        """Name of the body of the loop over ticks: the largest body, preferably with branches."""
        bodies = [
            re.search(r"body=%?([\w.\-]+)", one.rest)[1]
            for one in self._all()
            if one.opcode == "while"
        ]

        def size(body: str) -> tuple[bool, int]:
            branches = any(one.opcode == "conditional" for one in self.computations[body])
            return branches, sum(len(self.computations[name]) for _, name in self._below(body))

        return max(bodies, key=size, default=None)

    @cached_property
    def iterations(self) -> dict[str, int]:
        """How often each computation runs, by name: in a tick if the loop has it, else in a step.

        A branch counts as if it were always taken.
        """
        iterations = dict.fromkeys(self.computations, 1)
        for name in reversed(self.computations):  # callers before those that they call
            for one in self.computations[name]:
                turns = _TURNS.search(one.rest) if one.opcode == "while" else None
                for called in one.names if one.opcode in RUNS else ():
                    if called in iterations and called != self.loop:
                        iterations[called] = iterations[name] * int(turns[1] if turns else 1)
        return iterations

    @cached_property
    def ticks(self) -> int:
        """Ticks in one iteration of the loop: two where XLA has doubled its body."""
        return 2 if any(_CLONE in one.name for one in self._body()) else 1

    @cached_property
    def conditionals(self) -> int:
        """Number of conditionals in a tick, without nested ones."""
        return sum(one.opcode == "conditional" for one in self._body()) // self.ticks

    @cached_property
    def permutes(self) -> tuple[int | None, ...]:
        """For each collective-permute of the loop, how many conditionals hide it.

        These are between its start and its done; None: it is synchronous. Permutes outside the
        loop, which exchange mirrored parameters, are not included.
        """
        body = self._body()
        permutes: list[int | None] = [
            None for one in self._in_loop() if one.opcode == "collective-permute"
        ]
        for at, start in enumerate(body):
            if start.opcode != "collective-permute-start":
                continue
            end = next(
                (i for i, one in enumerate(body) if one.opcode == "collective-permute-done"
                 and start.name in one.names), at,
            )  # fmt: skip
            hides = sum(one.opcode == "conditional" for one in body[at:end])
            synchronous = '"is_sync":true' in start.rest
            permutes.append(None if synchronous else hides)
        return tuple(permutes)

    @property
    def hidden(self) -> bool:
        """Whether every permute is in flight during all conditionals of a tick."""
        least = max(1, self.conditionals)
        return all(hides is not None and hides >= least for hides in self.permutes)

    @cached_property
    def buffer_copies(self) -> tuple[DeviceCopy, ...]:
        """Copies in the loop of ring buffers and accumulators, which should be updated in place.

        A copy is identified by its shape alone: that of an array which ticks change and carry, but
        not that of a message.
        """
        return self._copies(self._carried - self._messages)

    @cached_property
    def message_copies(self) -> tuple[DeviceCopy, ...]:
        """Copies in the loop with the shape of a message, or of one of two sent together."""
        return self._copies(self._messages)

    @cached_property
    def host_copies(self) -> tuple[int | None, ...]:
        """For each copy between device and host in the loop, how many matrix products hide it.

        None: it is synchronous. Copies in branches are included.
        """
        copies = []
        for fused, name in self._below(self.loop) if self.loop else ():
            body = self.computations[name]
            shapes = {one.name: one.shape for one in body}
            for at, one in enumerate(body):
                read = (shapes.get(name, "") for name in one.names)
                moves = _HOST in one.shape or any(_HOST in shape for shape in read)
                if fused or not moves:
                    continue
                if one.opcode in _MOVES:
                    copies.append(None)
                elif one.opcode.removesuffix("-start") in _MOVES:
                    end = next(i for i, later in enumerate(body) if i > at and one.name in
                               later.names)  # fmt: skip
                    copies.append(sum(_PRODUCT in other.rest for other in body[at:end]))
        return tuple(copies)

    @cached_property
    def custom_calls(self) -> dict[str, int]:
        """Number of calls of each library function, such as `__cublas$lt$matmul`, in the text."""
        return dict(Counter(re.findall(r'custom_call_target="([^"]+)"', self.text)).most_common())

    @cached_property
    def looped(self) -> frozenset[str]:
        """The loop's body and all computations below it."""
        return frozenset(name for _, name in self._below(self.loop)) if self.loop else frozenset()

    def _body(self) -> list[Instruction]:
        return self.computations[self.loop] if self.loop else []

    def _in_loop(self) -> list[Instruction]:
        return [one for name in self.looped for one in self.computations[name]]

    def _all(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    def _below(self, name: str) -> Iterator[tuple[bool, str]]:
        """Yield a computation and all computations below it, each with whether it is fused."""
        seen, todo = {name}, [(False, name)]
        while todo:
            fused, current = todo.pop()
            yield fused, current
            for one in self.computations[current]:
                for called in one.names:
                    if called in self.computations and called not in seen:
                        seen.add(called)
                        todo.append((fused or one.opcode.startswith("fusion"), called))

    @cached_property
    def _carried(self) -> set[str]:
        """Shapes of the arrays in the loop's state that an iteration may change."""
        body = {one.name: one for one in self._body()}
        roots = [one for one in body.values() if one.root and one.opcode == "tuple"]
        shapes = set()
        for root in roots:
            for index, name in enumerate(root.operands):
                producer = body[name]
                same = (
                    producer.opcode == "get-tuple-element"
                    and f"index={index}," in producer.rest + ","
                )
                if not same or body[producer.names[0]].opcode != "parameter":
                    shapes.update(shape_elements(producer.shape))
        return {shape for shape in shapes if not shape.endswith("[]")}

    @cached_property
    def _messages(self) -> set[str]:
        sent = [one for one in self._in_loop() if one.opcode.startswith("collective-permute")]
        shapes = {
            shape for one in sent for shape in shape_elements(one.shape) if not shape.endswith("[]")
        }
        return shapes | {shape.replace("[2,", "[", 1) for shape in shapes if "[2," in shape}

    def _copies(self, shapes: set[str]) -> tuple[DeviceCopy, ...]:
        """Count copies of the given shapes; inside a fusion only the root is written to memory."""
        below = self._below(self.loop) if self.loop else ()
        count = Counter(
            shape_elements(one.shape)[0]
            for fused, name in below for one in self.computations[name]
            if one.opcode in ("copy", "copy-start") and (one.root or not fused)
        )  # fmt: skip
        return tuple(DeviceCopy(s, shape_bytes(s), count[s]) for s in sorted(shapes) if count[s])


@dataclass
class Thunk:
    """A launch by the host or a node of a CUDA graph: its kind, and nested thunks by label."""

    kind: str
    indent: int
    inside: list[tuple[str, "Thunk"]] = field(default_factory=list)
    label: str = ""

    def walk(self, graphed: bool = False) -> Iterator[tuple[bool, "Thunk"]]:
        """Yield this thunk and all nested ones, each with whether it belongs to a CUDA graph."""
        yield graphed, self
        for _, one in self.inside:
            yield from one.walk(graphed or self.kind == "kCommandBuffer")


class GraphCoverage(NamedTuple):
    """How much of a tick is in CUDA graphs.

    Attributes:
      whole: whether the loop's body is one graph.
      launches: thunks of the body that the host launches, by kind.
      stops: conditionals per iteration of the loop that the host waits for.
    """

    whole: bool
    launches: dict[str, int]
    stops: int


def parse_thunks(dump: str) -> Thunk:
    """Parse a thunk dump to a tree under one root."""
    stack = [Thunk("root", -1)]
    for line in dump.splitlines():
        if label := _LABEL.match(line):
            # XLA does not indent the label of a condition.
            while stack[-1].indent > len(label[1]) and label[2] != "condition":
                stack.pop()
            stack[-1].label = label[2]
        elif thunk := _THUNK.match(line):
            while stack[-1].indent >= len(thunk[1]):
                stack.pop()
            new = Thunk(thunk[2], len(thunk[1]))
            stack[-1].inside.append((stack[-1].label, new))
            stack.append(new)
    return stack[0]


def read_graph_coverage(dump: str, around: int = 0) -> GraphCoverage | None:
    """Return how the loop over ticks is launched, from the thunk dump; None without a loop.

    It is the largest loop, or the largest that is inside as many loops as are `around` it.
    """
    graphed, loop = False, parse_thunks(dump)
    for _ in range(1 + around):
        loops = [
            pair for pair in loop.walk(graphed) if pair[1].kind == "kWhile" and pair[1] is not loop
        ]
        if not loops:
            return None
        graphed, loop = max(loops, key=lambda pair: len(list(pair[1].walk())))
    body = [one for label, one in loop.inside if label == "body"]
    launches = Counter(one.kind for one in body)
    stops = sum(
        one.kind == "kConditional" and not inner
        for top in body for inner, one in top.walk(graphed)
    )  # fmt: skip
    whole = graphed or launches == {"kCommandBuffer": 1}
    return GraphCoverage(whole, dict(launches.most_common()), stops)
