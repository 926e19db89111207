"""Find which collectives of a compiled step overlap with compute, from the scheduled HLO.

A collective is **behind compute** if it is asynchronous and the schedule has a matrix product or
attention, or a conditional or loop with one, between its start and its done. Elementwise work does
not count, however large. This says nothing about times: the compute may be shorter than the
transfer.

Each collective of the text counts once, even in a branch that most ticks skip; the bytes of one in
a loop over layers count once for every iteration.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import prod
from typing import NamedTuple

import numpy as np

from jaxpipe.lab.gpu.program import Program, shape_bytes
from jaxpipe.runtime.programs.hlo import Instruction

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_WRAPS = ("fusion", "fusion-start", "async-start")  # opcodes that may wrap a collective
_PRODUCT = re.compile(r'custom_call_target="(?:__cublas|__cudnn|__triton|mosaic_gpu)')
_ACTION = re.compile(r'op_name="[^"]*/([FBWR]+)_chunk\d+(\+[BW]+)?')
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*)")
_OF_MESH = re.compile(r"mesh\[.*?\] \{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LIST = re.compile(r"\{\{([\d,]+)\}")


class Collective(NamedTuple):
    """One collective.

    Attributes:
      kind: opcode, such as `all-gather`.
      axes: mesh axes over which it communicates.
      looped: whether it is in the loop over ticks; otherwise it runs once a step.
      size: bytes of a device's input or output, the larger of the two, times the iterations of a
        loop over layers around it.
      hidden: whether it is behind compute.
      action: the action that it belongs to: F, B, W, BW or a pair such as F+B; "" for none.
    """

    kind: str
    axes: tuple[str, ...]
    looped: bool
    size: int
    hidden: bool
    action: str = ""


class CollectiveShare(NamedTuple):
    """Total over collectives of one kind over the same axes, all in the loop or all outside it.

    Attributes:
      count: number of collectives.
      size: their bytes.
      hidden: bytes of those behind compute.
      actions: `size` and `hidden` by action, of the collectives that belong to one.
    """

    kind: str
    axes: tuple[str, ...]
    looped: bool
    count: int
    size: int
    hidden: int
    actions: Mapping[str, tuple[int, int]] = {}


@dataclass(frozen=True)
class Collectives:
    """The collectives of a program compiled for a mesh; `mesh` has its axes' sizes, in order."""

    program: Program
    mesh: Mapping[str, int]

    @property
    def shares(self) -> tuple[CollectiveShare, ...]:
        """Totals by place (in the loop or outside it), kind and axes."""
        groups: dict[tuple[bool, str, tuple[str, ...]], list[Collective]] = {}
        for one in self:
            groups.setdefault((not one.looped, one.kind, one.axes), []).append(one)
        return tuple(
            CollectiveShare(kind, axes, not outside, len(of), *_sum_bytes(of), _sum_by_action(of))
            for (outside, kind, axes), of in sorted(groups.items())
        )

    @property
    def hidden_in_loop(self) -> float:
        """Share of the bytes of collectives in the loop that are behind compute; 1 of none."""
        size, hidden = _sum_bytes([one for one in self if one.looped])
        return hidden / size if size else 1.0

    def __iter__(self) -> Iterator[Collective]:
        computations, looped = self.program.computations, self.program.looped
        every = [one for instructions in computations.values() for one in instructions]
        wrapped = {name for one in every if one.opcode in _WRAPS for name in self._called(one)}
        for name, instructions in computations.items():
            if name not in wrapped:
                times = self.program.iterations[name]
                yield from self._of(instructions, times, looped=name in looped)

    def _of(
        self, instructions: Sequence[Instruction], times: int, *, looped: bool
    ) -> Iterator[Collective]:
        """Yield the collectives of one computation, which runs several times."""
        sizes = {one.name: shape_bytes(one.shape) for one in instructions}
        for at, start in enumerate(instructions):
            collective = self._collective(start)
            if collective is None:
                continue
            end, hidden = start, False
            if start.opcode.endswith("-start"):
                rest = instructions[at + 1 :]
                between = list(takewhile(lambda one: not _is_end_of(one, start), rest))  # noqa: B023
                end = rest[len(between)]
                synchronous = '"is_sync":true' in start.rest
                hidden = not synchronous and any(map(self._computes, between))
            operand_bytes = sum(sizes.get(name, 0) for name in start.operands)
            yield Collective(
                collective.opcode.removesuffix("-start"),
                mesh_axes(collective.rest, self.mesh),
                looped,
                max(operand_bytes, sizes[end.name]) * times,
                hidden,
                traced_action(start) or traced_action(collective),
            )

    def _collective(self, one: Instruction) -> Instruction | None:
        """Return the collective that an instruction is or wraps."""
        if one.opcode.removesuffix("-start") in _KINDS:
            return one
        if one.opcode not in _WRAPS:
            return None
        inside = (inner for name in self._called(one) for inner in self.program.computations[name])
        return next(filter(None, map(self._collective, inside)), None)

    def _computes(self, one: Instruction) -> bool:
        """Whether an instruction is or contains a matrix product or attention."""
        return _is_product(one) or not self._computing.isdisjoint(self._called(one))

    @cached_property
    def _computing(self) -> frozenset[str]:
        """Computations with a product or attention; HLO text has callees before their callers."""
        names: set[str] = set()
        for name, instructions in self.program.computations.items():
            if any(_is_product(o) or not names.isdisjoint(self._called(o)) for o in instructions):
                names.add(name)
        return frozenset(names)

    def _called(self, one: Instruction) -> list[str]:
        """Return the computations that an instruction calls."""
        return [name for name in one.names if name in self.program.computations]


def _sum_bytes(of: Sequence[Collective]) -> tuple[int, int]:
    """Return the bytes of all collectives, and of those behind compute."""
    return sum(one.size for one in of), sum(one.size for one in of if one.hidden)


def _sum_by_action(of: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """Return `_sum_bytes` by action."""
    actions = sorted({one.action for one in of if one.action})
    return {action: _sum_bytes([one for one in of if one.action == action]) for action in actions}


def traced_action(one: Instruction) -> str:
    """Return the action in whose name scope an instruction was traced, or ""."""
    action = _ACTION.search(one.rest)
    return action[1] + (action[2] or "") if action else ""


def _is_end_of(one: Instruction, start: Instruction) -> bool:
    return one.opcode.endswith("-done") and start.name in one.operands


def _is_product(one: Instruction) -> bool:
    library = one.opcode == "custom-call" and _PRODUCT.search(one.rest)
    return bool(library) or one.opcode == "dot"


def mesh_axes(rest: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes, of size > 1, over which a collective communicates.

    Devices are numbered in the mesh's order. XLA writes their groups in three ways:

    >>> mesh = {"pp": 4, "dp": 2, "tp": 2}
    >>> mesh_axes("channel_id=1, replica_groups=mesh['pp'=4,'dp'=2,'tp'=2] {'tp','dp'}, x=y", mesh)
    ('dp', 'tp')
    >>> mesh_axes("replica_groups=[8,2]<=[4,2,2]T(0,2,1), use_global_device_ids=true", mesh)
    ('dp',)
    >>> mesh_axes("source_target_pairs={{0,4},{4,8},{8,12},{12,0}}, metadata={}", mesh)
    ('pp',)
    """
    groups = _GROUPS.search(rest)
    text = groups[1] if groups else ""
    if named := _OF_MESH.match(text):
        return tuple(axis for axis in mesh if f"'{axis}'" in named[1] and mesh[axis] > 1)
    first = _first_group(text) or range(prod(mesh.values()))
    coordinates = np.unravel_index(np.asarray(first), tuple(mesh.values()))
    return tuple(axis for axis, along in zip(mesh, coordinates) if len(set(along.tolist())) > 1)


def _first_group(text: str) -> list[int]:
    """Return the devices of the first group; empty: one group has all devices."""
    if iota := _IOTA.match(text):
        shape, sizes, order = (part and [int(i) for i in part.split(",")] for part in iota.groups())
        devices = np.arange(prod(sizes)).reshape(sizes).transpose(order)
        return devices.reshape(shape)[0].tolist()
    listed = _LIST.match(text)
    return [int(i) for i in listed[1].split(",")] if listed else []
