"""The equations of a traced function, with those of its calls in their place."""

from collections.abc import Iterator
from itertools import count
from math import prod
from typing import Any, NamedTuple

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

LOOPS = ("cond", "scan", "while")  # equations whose bodies stay bodies
# Kernels with a jaxpr of what they do to single elements or blocks, by the beginnings of names.
_KERNELS = ("pallas_call", "reduce", "scatter")


class JaxprValue(NamedTuple):
    """A variable of a jaxpr in one of its calls; a jaxpr that is called twice has one of each."""

    var: Var
    call: int = 0

    @property
    def size(self) -> int:
        """Bytes of its array."""
        return bytes_of(self.var)


class Equation(NamedTuple):
    """An equation with its operands and results; the results of calls have no names of their own.

    Attributes:
      eqn: as traced.
      operands: values and literals.
      makes: results.
    """

    eqn: JaxprEqn
    operands: tuple[JaxprValue | Literal, ...]
    makes: tuple[JaxprValue, ...]

    @property
    def name(self) -> str:
        """Name of its primitive."""
        return self.eqn.primitive.name

    @property
    def reads(self) -> tuple[JaxprValue, ...]:
        """Its operands without literals."""
        return tuple(value for value in self.operands if isinstance(value, JaxprValue))


def inlined(jaxpr: Jaxpr) -> tuple[list[Equation], set[JaxprValue]]:
    """Return the equations of a jaxpr with those of its calls in their place, and its results.

    Every equation with a body is a call, except loops and conditions. Results of the jaxpr may be
    values of its calls.
    """
    names: dict[Var, JaxprValue | Literal] = {}
    equations = list(_inlined(jaxpr, names, 0, count(1)))
    results = (names.get(var, JaxprValue(var)) for var in jaxpr.outvars if isinstance(var, Var))
    return equations, {value for value in results if isinstance(value, JaxprValue)}


def _inlined(
    jaxpr: Jaxpr, names: dict[Var, JaxprValue | Literal], call: int, calls: Iterator[int]
) -> Iterator[Equation]:
    """`inlined` within a call.

    Args:
      names: what variables stand for that are not of this call.
      call, calls: its number, and those of further calls.
    """

    def named(var: Any) -> JaxprValue | Literal:
        return var if isinstance(var, Literal) else names.get(var, JaxprValue(var, call))

    for eqn in jaxpr.eqns:
        operands, bodies = tuple(map(named, eqn.invars)), bodies_of(eqn)
        if not bodies or eqn.primitive.name in LOOPS:
            yield Equation(eqn, operands, tuple(JaxprValue(var, call) for var in eqn.outvars))
            continue
        (body,), number = bodies, next(calls)
        inside = dict(zip(body.invars, operands))
        yield from _inlined(body, inside, number, calls)
        for result, of in zip(eqn.outvars, body.outvars):
            made = of if isinstance(of, Literal) else inside.get(of, JaxprValue(of, number))
            names[result] = made


def bodies_of(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs of a loop, of the branches of a condition, or of a call."""
    if eqn.primitive.name.startswith(_KERNELS):
        return []
    return [
        getattr(body, "jaxpr", body)
        for value in eqn.params.values()
        for body in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(body, ClosedJaxpr | Jaxpr)
    ]


def array_of(var: Any) -> ShapedArray:
    """Shape and dtype of the array that a variable or a literal stands for."""
    return var.aval


def bytes_of(var: Any) -> int:
    """Bytes of the array that a variable or a literal stands for."""
    array = array_of(var)
    return prod(array.shape) * getattr(array.dtype, "itemsize", 4)
