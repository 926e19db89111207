"""Run the equations of two halves in phases: one half computes while the other communicates.

XLA orders two independent chains so that half of their collectives overlap with compute, and of one
chain so that none does. Here equations are divided into phases, and a barrier lets a phase start
when the one before it has ended. In every phase one half (`halves.py`) runs matrix products, and
the other what lies between two groups of products: collectives, and elementwise work before them.
"""

from collections.abc import Callable, Iterator, Set
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, primitives

from jaxpipe.core.contract import Tree
from jaxpipe.core.split.halves import find_ties, half_named
from jaxpipe.core.split.jaxpr import bind, equations_to, read, shape_of, trace_flat, variables_in

_COLLECTIVES = {"all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter"}
_KERNELS = ("dot_product_attention", "fp8_ragged_dot", "pallas_call", "ragged_dot")
# A product or collective below this share of the largest one makes no phase of its own. The product
# of a router, 1/48 of that of the experts in Qwen3-30B, would make one that hides nothing.
_LEAST = 1 / 32


class _Phase(NamedTuple):
    """Equations of a phase, and the values for which the next phases wait.

    Beside each value stands the variable that has it in the next phases: the same one, or a result
    of `tie`.
    """

    eqns: list[JaxprEqn]
    tied: list[tuple[Any, Var]]


def run_in_phases(function: Callable[[], Tree]) -> Tree:
    """Return `function()`, which has layers in halves (`in_halves`), run in phases.

    A loop or a condition in the function is one equation; what it does is in phases where its body
    is run by this function too.
    """
    closed, form = _trace(function)
    return jax.tree.unflatten(form, _run(closed))


def run_beside_products(function: Callable[[], Tree], values: Tree) -> tuple[Tree, Tree]:
    """Return `function()`, a layer with y as the first result, and `values`, tied by a barrier.

    They end with y, or with the layer's last product where a collective follows it. A gather that
    may end with y starts with that collective, beside which nothing computes.
    """
    closed, form = _trace(function)
    jaxpr, state = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts))
    computes, sends = _largest(jaxpr, _flops), _largest(jaxpr, _sent)
    tied, product = jaxpr.outvars[0], None
    for eqn in equations_to(jaxpr, [tied], ()):
        if id(eqn) in computes:
            tied, product = jaxpr.outvars[0], eqn.outvars[0]
        elif id(eqn) in sends and product is not None:
            tied = product
    for eqn in jaxpr.eqns:
        bind(eqn, state)
        if tied in eqn.outvars:
            state[tied], values = lax.optimization_barrier((state[tied], values))
    return jax.tree.unflatten(form, [read(state, var) for var in jaxpr.outvars]), values


def _trace(function: Callable[[], Tree]) -> tuple[ClosedJaxpr, Any]:
    """Return the flat jaxpr of `function()`, and the tree structure of its result."""
    forms = []

    def flat() -> list[Any]:
        leaves, form = jax.tree.flatten(function())
        forms.append(form)
        return leaves

    return trace_flat(flat), forms[0]


def _run(closed: ClosedJaxpr) -> list[Any]:
    jaxpr = _without_joins(closed.jaxpr)
    values = dict(zip(jaxpr.constvars, closed.consts))
    for phase in _phases_of(jaxpr):
        for eqn in phase.eqns:
            bind(eqn, values)
        if phase.tied:
            before, after = zip(*phase.tied)
            tied = lax.optimization_barrier([read(values, var) for var in before])
            values.update(zip(after, tied))
    return [read(values, var) for var in jaxpr.outvars]


def has_halves(jaxpr: Jaxpr) -> bool:
    """Whether equations of the jaxpr name halves of the rows."""
    return any(half_named(eqn) is not None for eqn in jaxpr.eqns)


def _without_joins(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with the operands of a concatenation in place of the parts that equal them.

    The halves of a layer then depend on the same halves alone of the layer before.
    """
    joined: dict[Var, JaxprEqn] = {}
    same: dict[Any, Any] = {}
    is_tie = find_ties(jaxpr)
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[same.get(v, v) if isinstance(v, Var) else v for v in eqn.invars])
        join = joined.get(eqn.invars[0]) if eqn.primitive.name == "split" else None
        if join is not None and _undoes(eqn, join):
            same.update(zip(eqn.outvars, join.invars))
            continue
        if is_tie(eqn):  # of x, the end of a phase is a barrier already
            same[eqn.outvars[0]] = eqn.invars[0]
        if eqn.primitive is primitives.concatenate_p:
            joined[eqn.outvars[0]] = eqn
        eqns.append(eqn)
    outvars = [same.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _undoes(split: JaxprEqn, join: JaxprEqn) -> bool:
    dim = join.params["dimension"]
    sizes = tuple(shape_of(var).shape[dim] for var in join.invars)
    return split.params["axis"] == dim and tuple(split.params["sizes"]) == sizes


def _phases_of(jaxpr: Jaxpr) -> list[_Phase]:
    """Divide the equations into phases; the first has those that depend on no half."""
    computes, sends = _largest(jaxpr, _flops), _largest(jaxpr, _sent)
    is_tie = find_ties(jaxpr)
    numbers, halves = _number_phases(jaxpr, computes, sends)
    numbers = _end_with_collectives(jaxpr, numbers, sends, halves)
    numbers = _move_beside_collectives(jaxpr, numbers, sends, halves)
    phases = {number: _Phase([], []) for number in sorted({*numbers})}
    read_in = _last_reads(jaxpr, numbers, computes | sends)
    for eqn, number in zip(jaxpr.eqns, numbers):
        eqns, tied = phases[number]
        if is_tie(eqn):
            tied.extend(zip(eqn.invars[1:], eqn.outvars[1:]))
            continue
        eqns.append(eqn)
        of_half = (var for var in eqn.outvars if var in halves)
        tied.extend((var, var) for var in of_half if read_in.get(var, number) > number)
    return list(phases.values())


def _number_phases(jaxpr: Jaxpr, computes: set[int], sends: set[int]) -> tuple[list[int], Set[Var]]:
    """Return the phase of every equation, and the values that depend on a half.

    The first half communicates in even phases and computes in odd ones, the second half the other
    way round. What depends on both halves is in the earliest phase that has its operands.
    """
    halves: dict[Var, set[int]] = {}
    made_in: dict[Var, int] = {}
    is_tie = find_ties(jaxpr)
    numbers = []
    for eqn in jaxpr.eqns:
        named, operands = half_named(eqn), variables_in(eqn)
        of = {half for var in operands for half in halves.get(var, ())}
        of = of if named is None else {named}
        number = max((made_in.get(var, -1) for var in operands), default=-1)
        number = max(number, 0) if of else number
        if len(of) == 1 and (id(eqn) in computes or id(eqn) in sends):
            is_odd = (id(eqn) in computes) != (of == {1})
            number += number % 2 != is_odd
        numbers.append(number)
        if is_tie(eqn):
            made_in.update(dict.fromkeys(eqn.outvars, number + 1))
            continue
        made_in.update(dict.fromkeys(eqn.outvars if number >= 0 else (), number))
        halves.update(dict.fromkeys(eqn.outvars if of else (), of))
    return numbers, halves.keys()


def _end_with_collectives(
    jaxpr: Jaxpr, numbers: list[int], sends: set[int], halves: Set[Var]
) -> list[int]:
    """Return the phases with what reads the last collective of a phase in the next phase.

    XLA's scheduler begins with the last instruction of a phase. If that read a collective, the
    scheduler would place products before it comes to the collective's end, and too few are left to
    hide this collective and those before it.
    """
    # The phase of a value, and how many collectives of the phase it waits for, one by one.
    after: dict[Var, tuple[int, int]] = {}
    waits = []
    for eqn, number in zip(jaxpr.eqns, numbers):
        waits.append(max([(number, 0), *(after[v] for v in variables_in(eqn) if v in after)]))
        is_sent = id(eqn) in sends and not halves.isdisjoint(eqn.outvars)
        after.update(dict.fromkeys(eqn.outvars, (number, waits[-1][1] + is_sent)))
    last = {number: 0 for number in numbers}
    for number, sent in after.values():
        last[number] = max(last[number], sent)
    is_tie = find_ties(jaxpr)
    ended = []
    for eqn, (number, sent) in zip(jaxpr.eqns, waits):
        is_read = sent == last[number] > 0 and not (id(eqn) in sends or is_tie(eqn))
        ended.append(number + is_read)
    return _after_operands(jaxpr, ended)


def _move_beside_collectives(
    jaxpr: Jaxpr, numbers: list[int], sends: set[int], halves: Set[Var]
) -> list[int]:
    """Return the phases with what is added to a collective's result in the collective's phase.

    A shared expert is such a summand, for which no collective waits. In the phase that has its
    operands it is one product of many, but beside the last collective of a layer the only one.
    """
    sent: dict[Var, int] = {}  # the last phase with a collective for which a value waits
    waits = []
    for eqn, number in zip(jaxpr.eqns, numbers):
        last = max((sent.get(var, -1) for var in variables_in(eqn)), default=-1)
        is_sent = id(eqn) in sends and not halves.isdisjoint(eqn.outvars)
        waits.append((last, is_sent))
        sent.update(dict.fromkeys(eqn.outvars, number if is_sent else last))
    # The last phase in which a value may be computed; -1: it stays, as a y and what is sent do.
    latest = {var: -1 for var in jaxpr.outvars if isinstance(var, Var)}
    moved = []
    backwards = reversed(jaxpr.eqns), reversed(numbers), reversed(waits)
    for eqn, number, (last, is_sent) in zip(*backwards):
        read = [latest[var] for var in eqn.outvars if var in latest]
        until = -1 if is_sent or not read else min(read)
        moved.append(number if halves.isdisjoint(eqn.outvars) else max(number, until))
        for var in variables_in(eqn) if read or is_sent else ():
            before = until if is_sent or sent.get(var, -1) == last else last
            latest[var] = min(before, latest.get(var, before))
    return _after_operands(jaxpr, moved[::-1])


def _after_operands(jaxpr: Jaxpr, numbers: list[int]) -> list[int]:
    """Return the phases with every equation in that of its operands at the earliest."""
    made_in: dict[Var, int] = {}
    is_tie = find_ties(jaxpr)
    later = []
    for eqn, number in zip(jaxpr.eqns, numbers):
        operands = [var for var in eqn.invars[is_tie(eqn) :] if isinstance(var, Var)]
        later.append(max([number, *(made_in.get(var, number) for var in operands)]))
        made_in.update(dict.fromkeys(eqn.outvars, later[-1] + is_tie(eqn)))
    return later


def _last_reads(jaxpr: Jaxpr, numbers: list[int], ends: set[int]) -> dict[Var, int]:
    """Return the last phase that reads each value, for what leads to `ends` or to a layer's y.

    Ends are products and collectives, by `id`. A y is the concatenation of both halves. Nothing
    waits for other values, such as those for ring buffers.
    """
    last: dict[Var, int] = {}
    for eqn, number in zip(reversed(jaxpr.eqns), reversed(numbers)):
        is_end = id(eqn) in ends or eqn.primitive is primitives.concatenate_p
        if is_end or any(var in last for var in eqn.outvars):
            last.update({var: max(number, last.get(var, -1)) for var in variables_in(eqn)})
    return last


def _largest(jaxpr: Jaxpr, size: Callable[[JaxprEqn], float]) -> set[int]:
    """The equations, by `id`, that are at least `_LEAST` of the largest one; 0 is never."""
    sizes = {id(eqn): size(eqn) for eqn in jaxpr.eqns}
    known = [one for one in sizes.values() if one < float("inf")]
    least = _LEAST * max(known, default=0)
    return {eqn for eqn, one in sizes.items() if one and one >= least}


def _sent(eqn: JaxprEqn) -> float:
    """Bytes of a collective: of its operands or results, the larger of the two."""
    if eqn.primitive.name not in _COLLECTIVES:
        return 0

    def size(of: Any) -> int:
        shapes = map(shape_of, of)
        return sum(prod(like.shape) * like.dtype.itemsize for like in shapes)

    return max(size(eqn.invars), size(eqn.outvars))


def _flops(eqn: JaxprEqn) -> float:
    """FLOPs of a product; those of a kernel count as infinite."""
    if eqn.primitive.name.startswith(_KERNELS):
        return float("inf")
    if eqn.primitive is lax.dot_general_p:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = shape_of(eqn.invars[0]).shape
        return 2.0 * prod(shape_of(eqn.outvars[0]).shape) * prod(left[dim] for dim in contracted)
    return sum(_flops(inner) for body in _bodies(eqn) for inner in body.eqns)


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs of a call, of branches, or of a loop's body."""
    for param in eqn.params.values():
        for body in param if isinstance(param, tuple) else (param,):
            if isinstance(body, ClosedJaxpr):
                yield body.jaxpr
            elif isinstance(body, Jaxpr):
                yield body
