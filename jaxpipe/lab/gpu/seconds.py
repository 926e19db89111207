"""Estimate the seconds of a compiled step from its instructions: a bound, not a measurement.

A matrix product takes its FLOPs at the card's peak for its operands' dtype. Any other instruction
takes the time of XLA's cost model, but at most the time to read its operands and write its results
once at the card's bandwidth. Both corrections are needed: without a device XLA's model prices a
product by the dtype of its result (10.5 ms for a bfloat16 product with a float32 result, 0.12 ms at
the peak), and a softmax as if it were recomputed for every element (21 s for 64 MiB; jax 0.12.0).
Collectives take no time here. On cards that XLA's model does not know only products and copies do.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from msgspec import structs

from jaxpipe.lab.gpu.collectives import traced_action
from jaxpipe.lab.gpu.program import RUNS, Program, shape_bytes, shape_dims, shape_elements
from jaxpipe.model.kernels import grouped_fp8
from jaxpipe.planning import LayerSeconds, OpSeconds, RunPlan, estimate
from jaxpipe.runtime.devices import Device
from jaxpipe.runtime.programs.hlo import Instruction

_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")  # "%args#3" is an element of a tuple
_COST = re.compile(r'"exec_time_us":([\d.e+\-]+),[^{}]*"name":""')
_TARGET = re.compile(r'custom_call_target="__(cublas|cudnn\$fmha)[^"]*"')
_KERNEL = 'custom_call_target="mosaic_gpu'
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([\d,"]+)[\]}]')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":(\[[^\]]*\])')
_DTYPE = re.compile(r"\(?([a-z]+\d+\w*)\[")


class StepSeconds(NamedTuple):
    """Estimated seconds on one device.

    Attributes:
      actions: all layers of the device, by action: F, B, W, BW or a pair.
      embed_head: the rest of the loop, which is embedding and head.
      outside: everything before and after the loop, such as the optimizer update.
    """

    actions: Mapping[str, float]
    embed_head: float
    outside: float

    def step(self, plan: RunPlan, layers: int) -> tuple[float | None, float]:
        """Simulate a step with these seconds, and with the plan's.

        `layers` is the number of layers on a device.

        Returns:
          Seconds of a step by the instructions, including those outside the loop, and by the plan.
          The first is None where the program has no F outside of pairs, or no gradient.
        """
        ops = self.as_ops(layers, plan.seconds)
        return ops and estimate(plan, ops).seconds + self.outside, estimate(plan).seconds

    def as_ops(self, layers: int, planned: OpSeconds) -> OpSeconds | None:
        """Convert to a plan's seconds per layer, with `layers` on a device.

        Communication, copies and what each layer takes of the mean layer are taken from `planned`.
        None where the program has no F outside of pairs, or no gradient.
        """
        each = {name: seconds / layers for name, seconds in self.actions.items()}
        forward, b, w, r = (each.get(name, 0.0) for name in ("F", "B", "W", "R"))
        whole = each.get("BW", b + w)
        if not (forward and whole):
            return None
        if not (b and w):
            b = w = whole / 2
        layer = LayerSeconds(forward, b, w, whole, r)
        return structs.replace(
            planned, layer=layer, head=self.embed_head, embed=0.0, embed_gradient=0.0
        )


def estimate_seconds(program: Program, sheet: Device, bandwidth: float) -> StepSeconds:
    """Add up the seconds of a program's instructions.

    An instruction that occurs in several branches counts in each, and one in a loop over layers
    once for every layer.

    Args:
      program: the compiled step.
      sheet: the card's data sheet.
      bandwidth: of the card's memory, in bytes/s.
    """
    actions: Counter[str] = Counter()
    embed_head = outside = 0.0
    for computation, one, shapes in _launched_instructions(program):
        looped = computation in program.looped
        seconds = _seconds(one, shapes, sheet, bandwidth) * program.iterations[computation]
        action = traced_action(one)
        if not looped:
            outside += 0.0 if action else seconds
        elif action:
            actions[action] += seconds
        else:
            embed_head += seconds
    return StepSeconds(dict(actions), embed_head, outside)


def _launched_instructions(program: Program) -> Iterator[tuple[str, Instruction, dict[str, str]]]:
    """Yield every launched instruction with its computation's name and its body's shapes."""
    inside = {
        name
        for body in program.computations.values()
        for one in body
        if one.opcode not in RUNS
        for name in one.names
        if name in program.computations
    }
    for name, body in program.computations.items():
        if name not in inside:
            shapes = {one.name: one.shape for one in body}
            for one in body:
                yield name, *(_sliced_call(program, one) or (one, shapes))


def _sliced_call(
    program: Program, fusion: Instruction
) -> tuple[Instruction, dict[str, str]] | None:
    """Return the library call that a fusion makes on slices of arrays, with its body's shapes."""
    if fusion.opcode == "fusion":
        for name in fusion.names:
            body = program.computations.get(name, ())
            for one in body:
                if one.opcode == "custom-call" and _TARGET.search(one.rest):
                    return one, {each.name: each.shape for each in body}
    return None


def _seconds(one: Instruction, shapes: Mapping[str, str], sheet: Device, bandwidth: float) -> float:
    operands = [
        shape_elements(shapes[name])[int(index)] if index else shapes[name]
        for name, index in _OPERAND.findall(one.rest.split(")")[0])
        if name in shapes
    ]
    once = (shape_bytes(one.shape) + sum(map(shape_bytes, operands))) / bandwidth
    target = _TARGET.search(one.rest) if one.opcode == "custom-call" else None
    if one.opcode == "custom-call" and _KERNEL in one.rest and _are_fp8(operands):
        return grouped_fp8.flops(*map(shape_dims, operands[:2])) / _peak_flops(operands, sheet)
    if one.opcode == "dot" or target:
        flops = _attention_flops if target and target[1] != "cublas" else _product_flops
        return flops(one, operands) / _peak_flops(operands, sheet)
    if cost := _COST.search(one.rest):
        return min(float(cost[1]) / 1e6, once)
    return once if one.opcode == "copy" else 0.0


def _product_flops(one: Instruction, operands: list[str]) -> float:
    """Return the FLOPs of a product: 2 x elements of the result x contracted elements."""
    summed, left = _CONTRACTED.search(one.rest), shape_dims(operands[0])
    dims = summed[1].replace('"', "").split(",") if summed else ()
    return 2.0 * prod(shape_dims(one.shape)) * prod(left[int(dim)] for dim in dims)


def _attention_flops(one: Instruction, operands: list[str]) -> float:
    """Return the FLOPs of cuDNN's attention: 2 products, 5 in the gradient; half if causal."""
    scores = _SCORES.search(one.rest)
    keys = int(json.loads(scores[1])[-1]) if scores else 0
    products = 5 if "Backward" in one.rest else 2
    causal = 0.5 if '"CAUSAL"' in one.rest else 1.0
    return products * 2.0 * prod(shape_dims(operands[0])) * keys * causal


def _peak_flops(operands: list[str], sheet: Device) -> float:
    """Return the peak FLOP/s for the operands' dtypes; float32 runs as TF32, at half the rate."""
    if _are_fp8(operands) and sheet.fp8:
        return sheet.fp8
    return sheet.flops / (2 if "f32" in _dtypes(operands) else 1)


def _are_fp8(operands: list[str]) -> bool:
    """Whether one of the first two operands is in 8-bit floats."""
    return any(dtype.startswith("f8") for dtype in _dtypes(operands))


def _dtypes(operands: list[str]) -> list[str]:
    return [match[1] for match in map(_DTYPE.match, operands[:2]) if match]
