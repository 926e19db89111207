"""Bytes that a traced function holds at once: a linear scan over its equations, as XLA fuses them.

A value that is in memory is live from the equation that makes it to the last one that reads it
(Poletto and Sarkar 1999, "Linear Scan Register Allocation"). XLA fuses elementwise and data-moving
equations into the kernels that read their results. Such a result is in memory only if an operation
reads it that is a kernel of its own, such as a product, a collective or a loop; all other readers
compute it again, and the values that it is computed from stay live for them.
"""

from collections.abc import Collection, Iterator
from math import prod
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_CALLS = (
    "pjit", "jit", "closed_call", "core_call", "checkpoint", "remat", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr",
)  # fmt: skip
_BODIES = ("scan", "while", "cond")
# Operations whose operands and results are in memory; the names of some begin so.
_KERNELS = (
    "all_gather", "all_to_all", "conv_general", "cum", "dot_general", "dot_product_attention",
    "optimization_barrier", "pallas_call", "ppermute", "psum", "ragged_dot", "reduce_scatter",
    "scatter", "sort", "top_k", *_BODIES,
)  # fmt: skip
_RENAMES = ("convert_element_type", "copy", "name", "reshape", "transpose")
_SUMS = ("add", "add_any")
# Operations that read fused operands and write their results.
_REDUCTIONS = ("argmax", "argmin", "reduce_")


class Step(NamedTuple):
    """One operation of a function whose calls are inlined.

    Attributes:
      name: of the primitive.
      reads, makes: its operands and results, without constants.
      inner: bytes that its body holds at once, if it is a loop or a branch.
    """

    name: str
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    inner: int

    @property
    def is_fused(self) -> bool:
        """Whether its results are computed by those who read them."""
        return not self.name.startswith(_KERNELS + _REDUCTIONS)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, which can be added to an array in place."""
        return self.name.startswith(("dot_general", "ragged_dot"))


class WorkingSet(NamedTuple):
    """Bytes in memory while a function runs.

    Attributes:
      peak: the most at once; results count until their last reader in the function, as if its
        caller then added or wrote them where it has room.
      results: of results that are in memory: what a caller that writes them later has to hold.
    """

    peak: int
    results: int


def working_set(
    jaxpr: Jaxpr, live: Collection[Var] = (), stored: Collection[Var] = ()
) -> WorkingSet:
    """Return the bytes of the values that a jaxpr computes.

    Args:
      jaxpr: traced at the shapes of one device.
      live: inputs that take memory until their last reader; other inputs take none.
      stored: inputs that are slices of larger arrays, which kernels read from a copy.

    >>> import jax, jax.numpy as jnp
    >>> def mlp(x, up, down):
    ...     return jnp.sin(jnp.tanh(x @ up) @ down)
    >>> jaxpr = jax.make_jaxpr(mlp)(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((5, 3))).jaxpr
    >>> working_set(jaxpr)  # x @ up and its tanh, of 10 floats each
    WorkingSet(peak=80, results=0)
    """
    steps = list(_steps(jaxpr, {}))
    outputs = {var for var in jaxpr.outvars if isinstance(var, Var)}
    written = _written(steps, stored, outputs)
    sources = {var: frozenset((var,)) for var in written.union(live)}
    begins = dict.fromkeys(live, 0)
    ends: dict[Var, int] = {}
    for place, step in enumerate(steps):
        read = frozenset().union(*(sources.get(var, ()) for var in step.reads))
        sources |= {var: read for var in step.makes if step.is_fused and var not in written}
        made = written.intersection(step.makes)
        for var in made.union(read) if made or not step.is_fused else ():
            begins.setdefault(var, place)
            ends[var] = place
    results = sum(_bytes(var) for var in written.intersection(outputs))
    return WorkingSet(_largest(steps, begins, ends), results)


def _written(steps: list[Step], stored: Collection[Var], results: set[Var]) -> set[Var]:
    """The values in memory: what operations make that are not fused, and what kernels read.

    A product that is only added to something is added where that is, as one of a gradient to its
    sum.
    """
    makers = {var: step for step in steps for var in step.makes}
    readers: dict[Var, list[Step]] = {}
    for step in steps:
        for var in {*step.reads}:
            readers.setdefault(var, []).append(step)
    written = {var for var, step in makers.items() if not step.is_fused}
    kernels = (step for step in steps if step.name.startswith(_KERNELS))
    written |= {var for step in kernels for var in step.reads if var in makers or var in stored}
    for made in [var for var in written if var in makers and makers[var].is_product]:
        last = made
        while len(after := readers.get(last, ())) == 1 and after[0].name in _RENAMES:
            (last,) = after[0].makes
        sums = [one.makes[0] for one in after if one.name in _SUMS]
        if len(sums) == len(after) <= 1:
            written.discard(made)
            written |= set(sums) - results
    return written


def _largest(steps: list[Step], begins: dict[Var, int], ends: dict[Var, int]) -> int:
    """The largest sum of live values; a loop updates in place what nothing reads after it."""
    born: list[list[Var]] = [[] for _ in steps]
    dying: list[list[Var]] = [[] for _ in steps]
    for var, end in ends.items():
        born[begins[var]].append(var)
        dying[end].append(var)
    held = largest = 0
    for place, step in enumerate(steps):
        held += sum(map(_bytes, born[place]))
        given = sum(_bytes(var) for var in dying[place] if var not in step.makes)
        made = sum(_bytes(var) for var in step.makes if var in ends)
        in_place = min(made, given) if step.name in _BODIES else 0
        largest = max(largest, held - in_place + step.inner)
        held -= sum(map(_bytes, dying[place]))
    return largest


def _steps(jaxpr: Jaxpr, names: dict[Var, Any]) -> Iterator[Step]:
    """Yield the operations of a jaxpr, and those of its calls in their place.

    Args:
      names: the variable of the outermost jaxpr that each variable stands for, to which the results
        of calls are added.
    """

    def outer(var: Any) -> Any:
        return var if isinstance(var, Literal) else names.get(var, var)

    for eqn in jaxpr.eqns:
        bodies = list(_bodies(eqn))
        if eqn.primitive.name in _CALLS and bodies:
            inside = dict(zip(bodies[0].invars, map(outer, eqn.invars)))
            yield from _steps(bodies[0], inside)
            results = (
                one if isinstance(one, Literal) else inside.get(one, one)
                for one in bodies[0].outvars
            )
            names |= zip(eqn.outvars, results)
            continue
        inner = [working_set(body).peak for body in bodies]
        is_platform = eqn.params.get("branches_platforms")
        reads = (outer(var) for var in eqn.invars)
        yield Step(
            eqn.primitive.name,
            tuple(var for var in reads if not isinstance(var, Literal)),
            tuple(eqn.outvars),
            (inner[-1] if is_platform else max(inner)) if inner else 0,
        )


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if isinstance(body, ClosedJaxpr | Jaxpr):
                yield getattr(body, "jaxpr", body)


def _bytes(var: Var) -> int:
    dtype = getattr(var.aval.dtype, "itemsize", 4)
    return prod(var.aval.shape) * dtype
