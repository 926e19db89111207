"""Bytes that a traced function holds at once: a linear scan over its equations, as XLA fuses them.

A value that is in memory is live from the equation that makes it to the last one that reads it
(Poletto and Sarkar 1999, "Linear Scan Register Allocation"). XLA fuses elementwise and data-moving
equations into the kernels that read their results. Such a result is in memory only if an operation
reads it that is a kernel of its own, such as a product, a collective or a loop; all other readers
compute it again, and the values that it is computed from stay live for them.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpipe.model.kernels import cudnn
from jaxpipe.planning.cost.inlining import LOOPS, Equation, JaxprValue, bodies_of, inlined

_COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter")
# Operations whose operands and results are in memory, by the beginnings of their names.
_KERNELS = (
    "conv_general", "cum", "dot_general", "dot_product_attention", "fp8_ragged_dot",
    "optimization_barrier", "pallas_call", "ragged_dot", "scatter", "sort", "top_k",
    *_COLLECTIVES, *LOOPS,
)  # fmt: skip
_REDUCTIONS = ("argmax", "argmin", "reduce_")  # read fused operands and write their results
_PRODUCTS = ("dot_general", "ragged_dot")
_SCATTER = "scatter-add"
_RENAMES = ("convert_element_type", "copy", "name", "reshape", "transpose")
_SUMS = ("add", "add_any")


class Step(NamedTuple):
    """One operation of a function whose calls are inlined.

    Attributes:
      name: of the primitive.
      reads, makes: its operands and results, without literals.
      inner: bytes that it takes beside these: of its body, if it is a loop or a condition.
      sends: whether it is a collective, or a loop or a condition with one.
    """

    name: str
    reads: tuple[JaxprValue, ...]
    makes: tuple[JaxprValue, ...]
    inner: int
    sends: bool

    @property
    def is_fused(self) -> bool:
        """Whether its results are computed by those who read them."""
        return not self.name.startswith(_KERNELS + _REDUCTIONS)


class WorkingSet(NamedTuple):
    """Bytes of the values that a function computes.

    Attributes:
      peak: the most in memory at once. Results count until their last reader in the function: its
        caller adds them to something, or writes them where it has room.
      results: of results in memory: what a caller holds that writes them later.
      sending: the most in memory until the last collective ends; 0: there is none.
    """

    peak: int
    results: int
    sending: int = 0


def working_set(
    jaxpr: Jaxpr, live: Collection[Var] = (), stored: Collection[Var] = ()
) -> WorkingSet:
    """Return the bytes of the values that a jaxpr computes.

    Args:
      jaxpr: traced at the shapes of one device.
      live: inputs that take memory until their last reader; other inputs take none.
      stored: inputs that are slices of larger arrays, of which kernels read a copy.

    >>> import jax, jax.numpy as jnp
    >>> def mlp(x, up, down):
    ...     return jnp.sin(jnp.tanh(x @ up) @ down)
    >>> jaxpr = jax.make_jaxpr(mlp)(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((5, 3))).jaxpr
    >>> working_set(jaxpr)  # x @ up and its tanh, 10 floats each
    WorkingSet(peak=80, results=0, sending=0)
    """
    equations, outputs = inlined(jaxpr)
    steps = list(_steps(equations))
    written = _written(steps, set(map(JaxprValue, stored)), outputs)
    given = set(map(JaxprValue, live))
    sources = {value: frozenset((value,)) for value in written | given}
    begins, ends = dict.fromkeys(given, 0), {}
    for place, step in enumerate(steps):
        read = frozenset().union(*(sources.get(value, ()) for value in step.reads))
        made = written.intersection(step.makes)
        if step.is_fused and not made:
            sources |= dict.fromkeys(step.makes, read)
            continue
        for value in made | read:
            begins.setdefault(value, place)
            ends[value] = place
    results = sum(value.size for value in written & outputs)
    held = _held(steps, begins, ends)
    last = max((place for place, step in enumerate(steps) if step.sends), default=-1)
    return WorkingSet(max(held, default=0), results, max(held[: last + 1], default=0))


def _written(
    steps: list[Step], stored: set[JaxprValue], outputs: set[JaxprValue]
) -> set[JaxprValue]:
    """The values in memory: results of operations that are not fused, and what kernels read.

    A product reads a transposed operand where it is, and a scatter writes where its operand is. A
    product or scatter that is only added to something is added in place, as a gradient to its sum.
    """
    readers: dict[JaxprValue, list[Step]] = {}
    for step in steps:
        for value in {*step.reads}:
            readers.setdefault(value, []).append(step)
    made = {value for step in steps for value in step.makes}
    written = {value for step in steps if not step.is_fused for value in step.makes}
    transposed = {step.makes[0]: step.reads[0] for step in steps if step.name == "transpose"}
    for step in steps:
        if step.name.startswith(_KERNELS):
            of = transposed if step.name.startswith(_PRODUCTS) else {}
            reads = step.reads[step.name == _SCATTER :]
            written |= {of.get(value, value) for value in reads} & (made | stored)
    for step in steps:
        if not step.name.startswith((*_PRODUCTS, _SCATTER)):
            continue
        (product,) = (last,) = step.makes
        while len(after := readers.get(last, [])) == 1 and after[0].name in _RENAMES:
            (last,) = after[0].makes
        if not after:
            written.discard(product)
        elif len(after) == 1 and after[0].name in _SUMS and product not in outputs:
            written.discard(product)
            written |= set(after[0].makes) - outputs
    return written


def _held(
    steps: list[Step], begins: dict[JaxprValue, int], ends: dict[JaxprValue, int]
) -> list[int]:
    """Bytes that are live at each step; a loop updates in place what nothing reads after it."""
    starting: list[list[JaxprValue]] = [[] for _ in steps]
    ending: list[list[JaxprValue]] = [[] for _ in steps]
    for value, end in ends.items():
        starting[begins[value]].append(value)
        ending[end].append(value)
    held, at_steps = 0, []
    for place, step in enumerate(steps):
        held += sum(value.size for value in starting[place])
        in_place = 0
        if step.name in LOOPS:
            made = sum(value.size for value in step.makes if value in ends)
            read_last = sum(value.size for value in ending[place] if value not in step.makes)
            in_place = min(made, read_last)
        at_steps.append(held - in_place + step.inner)
        held -= sum(value.size for value in ending[place])
    return at_steps


def _steps(equations: Iterable[Equation]) -> Iterator[Step]:
    """Yield the operations of equations."""
    same: dict[JaxprValue, JaxprValue | Literal] = {}  # what barriers return
    for eqn, operands, makes in equations:
        name = eqn.primitive.name
        operands = tuple(
            same.get(value, value) if isinstance(value, JaxprValue) else value for value in operands
        )
        if name == "optimization_barrier":  # it orders operations and copies nothing
            same |= dict(zip(makes, operands))
            makes = ()
        inner = [working_set(body).peak for body in bodies_of(eqn)]
        avals: list[Any] = [var.aval for var in eqn.invars]
        inner = inner or [cudnn.workspace(name, tuple(aval.shape for aval in avals))]
        yield Step(
            name,
            tuple(value for value in operands if isinstance(value, JaxprValue)),
            makes,
            inner[-1] if eqn.params.get("branches_platforms") else max(inner),
            _sends(eqn),
        )


def _sends(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective or has one."""
    inner = (one for body in bodies_of(eqn) for one in body.eqns)
    return eqn.primitive.name.startswith(_COLLECTIVES) or any(map(_sends, inner))
