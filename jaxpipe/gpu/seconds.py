"""How long a compiled step's ops would take by its instructions: a bound, not a measurement.

A product of matrices takes its FLOPs at the card's peak for its operands' dtype; all else what
XLA's own cost model says, but no longer than reading its operands and writing its results once at
the card's bandwidth. Both corrections are needed: without a device XLA's model prices a product by
the dtype of its result (10.5 ms for one of bfloat16 whose result is float32, 0.12 ms at the peak)
and a softmax as one that is made anew for every element (21 s for 64 MiB; jax 0.12.0).
Collectives take no time here, nor does what is no product on cards that XLA's model does not know.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from jaxpipe.config import Config
from jaxpipe.gpu.collectives import action_of
from jaxpipe.gpu.program import Instruction, Program, bytes_of, dims_of
from jaxpipe.planning import Candidate, Hardware, LayerSeconds, OpSeconds, estimate, op_seconds
from jaxpipe.planning.candidates import variant_of
from jaxpipe.planning.chosen import Choice
from jaxpipe.runtime.devices import Device

_NAME = re.compile(r"%([\w.\-]+)")
_COST = re.compile(r'"exec_time_us":([\d.e+\-]+),[^{}]*"name":""')
_TARGET = re.compile(r'custom_call_target="__(cublas|cudnn\$fmha)[^"]*"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([\d,"]+)[\]}]')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":(\[[^\]]*\])')
_DTYPE = re.compile(r"\(?([a-z]+\d+\w*)\[")
_RUNS = ("while", "conditional", "call")  # opcodes whose computations run as they stand


class Seconds(NamedTuple):
    """Of one device. `actions`: of all layers of each op that a tick has, by F, B, W or BW, or a
    pair; `ends`: of what else its loop does, embedding and head; `outside`: of what is before and
    after the loop, the update.
    """

    actions: Mapping[str, float]
    ends: float
    outside: float

    def step(
        self, config: Config, choice: Choice, layers: int, hardware: Hardware
    ) -> tuple[float | None, float]:
        """Of a whole step by these, and by the plan's own; both by the plan's simulator.

        `layers`: of a device. The first has what is outside the loop too; it is None where the
        program has no F alone, or no gradient.
        """
        planned, own = op_seconds(config, hardware), Candidate(variant_of(config), choice)
        by_plan = estimate(config, own, planned).seconds
        ops = self.as_ops(layers, planned)
        return ops and estimate(config, own, ops).seconds + self.outside, by_plan

    def as_ops(self, layers: int, planned: OpSeconds) -> OpSeconds | None:
        """As a plan takes them, of a layer, where a device has so many; messages are the plan's.

        None where the program has no F alone, or no gradient.
        """
        each = {name: seconds / layers for name, seconds in self.actions.items()}
        forward, b, w = (each.get(name, 0.0) for name in ("F", "B", "W"))
        whole = each.get("BW", b + w)
        if not (forward and whole):
            return None
        if not (b and w):
            b = w = whole / 2
        return OpSeconds(
            layer=LayerSeconds(forward, b, w, whole),
            head=self.ends,
            transfer=planned.transfer,
            copies=planned.copies,
            exchange=planned.exchange,
        )


def seconds_of(program: Program, sheet: Device, bandwidth: float) -> Seconds:
    """By the instructions of a program, on a card of this data sheet and bandwidth (bytes/s).

    What stands in several branches counts in each.
    """
    actions: Counter[str] = Counter()
    ends = outside = 0.0
    for looped, one, shapes in _running(program):
        seconds = _seconds(one, shapes, sheet, bandwidth)
        action = action_of(one)
        if not looped:
            outside += 0.0 if action else seconds
        elif action:
            actions[action] += seconds
        else:
            ends += seconds
    return Seconds(dict(actions), ends, outside)


def _running(program: Program) -> Iterator[tuple[bool, Instruction, dict[str, str]]]:
    """Every instruction that is launched: in the loop or not, and the shapes beside it."""
    inside = {
        name
        for body in program.computations.values()
        for one in body
        if one.opcode not in _RUNS
        for name in _NAME.findall(one.rest)
        if name in program.computations
    }
    for name, body in program.computations.items():
        if name not in inside:
            shapes = {one.name: one.shape for one in body}
            for one in body:
                yield name in program.looped, one, shapes


def _seconds(one: Instruction, shapes: Mapping[str, str], sheet: Device, bandwidth: float) -> float:
    operands = [shapes[name] for name in _NAME.findall(one.rest.split(")")[0]) if name in shapes]
    once = (bytes_of(one.shape) + sum(map(bytes_of, operands))) / bandwidth
    target = _TARGET.search(one.rest) if one.opcode == "custom-call" else None
    if one.opcode == "dot" or target:
        flops = _of_attention if target and target[1] != "cublas" else _of_product
        return flops(one, operands) / _peak(operands, sheet)
    if cost := _COST.search(one.rest):
        return min(float(cost[1]) / 1e6, once)
    return once if one.opcode == "copy" else 0.0


def _of_product(one: Instruction, operands: list[str]) -> float:
    """FLOPs: two for every element of the result and each that is summed for it."""
    summed, left = _CONTRACTED.search(one.rest), dims_of(operands[0])
    dims = summed[1].replace('"', "").split(",") if summed else ()
    return 2.0 * prod(dims_of(one.shape)) * prod(left[int(dim)] for dim in dims)


def _of_attention(one: Instruction, operands: list[str]) -> float:
    """FLOPs of cuDNN's attention: two products of scores, five in its gradient; half if causal."""
    scores = _SCORES.search(one.rest)
    keys = int(json.loads(scores[1])[-1]) if scores else 0
    products = 5 if "Backward" in one.rest else 2
    causal = 0.5 if '"CAUSAL"' in one.rest else 1.0
    return products * 2.0 * prod(dims_of(operands[0])) * keys * causal


def _peak(operands: list[str], sheet: Device) -> float:
    """FLOP/s of a product of such operands; float32 is multiplied as TF32, at half the rate."""
    dtypes = [found[1] for found in map(_DTYPE.match, operands[:2]) if found]
    if any(dtype.startswith("f8") for dtype in dtypes) and sheet.fp8:
        return sheet.fp8
    return sheet.flops / (2 if "f32" in dtypes else 1)
