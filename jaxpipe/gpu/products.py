"""Which products of matrices a compiled step has: by which library, of which dtypes, where."""

import re
from collections import Counter
from typing import NamedTuple

from jaxpipe.gpu.program import Instruction, Program

_TARGET = re.compile(r'custom_call_target="(__cublas[^"]*)"')
_NAME = re.compile(r"%([\w.\-]+)")
_DTYPE = re.compile(r"\(?([a-z]+\d+\w*)\[")
_OP = re.compile(r"/([A-Z]+)_chunk\d+(?:\+([A-Z]+)_chunk)?")
_OPCODES = ("dot", "ragged-dot", "dot-general")


class Product(NamedTuple):
    """Products of a kind: so many in the program's text, each once for the branch it stands in.

    `op`: F, B, W or BW of layers; "" of the rest, embedding and head. `library`: the function that
    is called, or `XLA` where it is a kernel of XLA's own. `operands`: their dtypes, left and right.
    """

    op: str
    library: str
    operands: str
    count: int


def products(text: Program) -> tuple[Product, ...]:
    """The products of matrices of a program, those of attention's fused kernel not among them.

    Of a cell with two ops both are named (F+BW).
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for body in text.computations.values():
        shapes = {one.name: one.shape for one in body}
        for one in body:
            if library := _library(one):
                named = _NAME.findall(one.rest)[:2]
                dtypes = [_DTYPE.match(shapes.get(name, "")) for name in named]
                operands = " x ".join(match[1] if match else "?" for match in dtypes)
                op = _OP.search(one.rest)
                ops = "+".join(filter(None, op.groups())) if op else ""
                found[ops, library, operands] += 1
    return tuple(Product(*kind, count) for kind, count in sorted(found.items()))


def _library(one: Instruction) -> str:
    """Who makes the product; "" where the instruction is none."""
    if target := _TARGET.search(one.rest):
        return target[1]
    return "XLA" if one.opcode in _OPCODES else ""
