"""The kernels of a traced function, as XLA fuses its equations.

XLA fuses elementwise and data-moving equations into one kernel for every value that something
reads from memory: another kernel, the caller, or several fusions with other operands. Kernels with
the same operands are one. A sum along rows, as of a norm, is part of the kernel that reads it.
"""

from math import prod

from jax.extend.core import Jaxpr, JaxprEqn

from jaxpipe.core.split.jaxpr import JOIN
from jaxpipe.model.kernels import cudnn, grouped_fp8
from jaxpipe.planning.cost.inlining import (
    Equation,
    JaxprValue,
    array_of,
    bodies_of,
    bytes_of,
    inlined,
)
from jaxpipe.planning.cost.kernels import Attention, Operations, Product

_PRODUCTS = ("dot_general", "ragged_dot", grouped_fp8.NAME)
_COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter")
# Other equations that are kernels of their own, by the beginnings of their names.
_KERNELS = (*_PRODUCTS, *_COLLECTIVES, "conv_general", "cum", "dot_product_attention",
            "pallas_call", "scatter", "sort", "top_k")  # fmt: skip
_RENAMES = ("copy", "expand_dims", "name", "optimization_barrier", "reshape", "squeeze",
            "stop_gradient")  # fmt: skip
_SMALL = 2**16  # bytes of a value that a kernel reads beside others in no time
_PARTS = ("dynamic_slice", "gather", "slice", "split")  # read no more than they return


def operations_of(
    jaxpr: Jaxpr, iterations: float = 1, *, adds: bool = False, is_loop: bool = False
) -> Operations:
    """Return the kernels of a jaxpr, with all iterations of loops and the largest branch.

    A `while` loop counts `iterations` times; of branches for platforms the one not for CPU counts.
    With `adds`, products that are results of the jaxpr are added to sums of their size, in place.
    The body of a loop (`is_loop`) updates slices of its arrays in place.

    >>> import jax, jax.numpy as jnp
    >>> def mlp(x, up, down):
    ...     return jnp.sin(jnp.tanh(x @ up) @ down)
    >>> jaxpr = jax.make_jaxpr(mlp)(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((5, 3))).jaxpr
    >>> found = operations_of(jaxpr)  # tanh reads and writes 2 x 5 floats, sin 2 x 3
    >>> found.flops(), found.moved, found.launches
    (120.0, 128.0, 4.0)
    """
    found = Operations()
    steps, results = inlined(jaxpr)
    for step in steps:
        if bodies := bodies_of(step.eqn):
            found.add(_of_bodies(step.eqn, bodies, iterations))
    _count_kernels(steps, results, found, adds=adds, is_loop=is_loop)
    return found


def _is_kernel(step: Equation) -> bool:
    """Whether an equation's operands and results are in memory."""
    return step.name.startswith(_KERNELS) or bool(bodies_of(step.eqn))


def _of_bodies(eqn: JaxprEqn, bodies: list[Jaxpr], iterations: float) -> Operations:
    """The kernels of a loop, or of the largest branch of a condition."""
    name, is_loop = eqn.primitive.name, eqn.primitive.name != "cond"
    each = [operations_of(body, iterations, is_loop=is_loop) for body in bodies]
    if name == "cond":
        if eqn.params.get("branches_platforms"):
            return each[-1]
        return max(each, key=lambda one: (one.flops(), one.moved))
    every = Operations()
    for body in each:
        every.add(body, {"scan": eqn.params.get("length", 1), "while": iterations}.get(name, 1))
    return every


def _count_kernels(
    steps: list[Equation], results: set[JaxprValue], found: Operations,
    *, adds: bool, is_loop: bool,
) -> None:  # fmt: skip
    """Add the kernels of the steps, except those of bodies."""
    same = _renamed(steps)

    def named(value: JaxprValue) -> JaxprValue:
        return same.get(value, value)

    wanted = {named(value) for value in results}
    sums = wanted if adds else set()
    stored = (step for step in steps if _is_kernel(step) or step.name == JOIN)
    wanted = wanted | {named(value) for step in stored for value in step.reads}
    sources: dict[JaxprValue, frozenset[JaxprValue]] = {}
    fused: dict[frozenset[JaxprValue], int] = {}  # bytes that the kernel with these operands moves
    for step in steps:
        if _is_kernel(step):
            added = sum(value.size for value in sums.intersection(step.makes))
            _count_kernel(step, added, found)
            continue
        if step.name in _RENAMES or step.name == JOIN:  # halves are written beside each other
            continue
        operands, sizes = step.reads, {value: value.size for value in step.makes}
        if is_loop and step.name == "dynamic_update_slice":
            operands = tuple(v for v in step.operands[1:2] if isinstance(v, JaxprValue))
            sizes = dict.fromkeys(step.makes, bytes_of(step.eqn.invars[1]))
        reads = frozenset().union(*(sources.get(named(v), {named(v)}) for v in operands))
        if any(read.size > _SMALL for read in reads):
            reads = frozenset(read for read in reads if read.size > _SMALL)
        for value, size in sizes.items():
            is_part = step.name in _PARTS and size < sum(read.size for read in reads)
            is_sum = step.name.startswith("reduce_") and not _along_rows(step.eqn)
            if value not in wanted and not is_part and not is_sum:
                sources[value] = reads
                continue
            if is_part and value not in wanted:  # its reader reads no more of the operands
                sources[value] = frozenset({value})
                continue
            moved = 2 * size if is_part else size
            fused.setdefault(reads, 0 if is_part else sum(read.size for read in reads))
            fused[reads] += moved
    found.moved += sum(fused.values())
    found.launches += len(fused)


def _count_kernel(step: Equation, added: int, found: Operations) -> None:
    """Add an equation that is a kernel of its own, and reads `added` bytes of sums."""
    eqn, name = step.eqn, step.name
    if name.startswith(_COLLECTIVES) or bodies_of(eqn):
        return
    found.launches += 1
    moved = added + sum(map(bytes_of, (*eqn.invars, *eqn.outvars)))
    shapes = tuple(array_of(var).shape for var in eqn.invars)
    if name.startswith(_PRODUCTS):
        found.add(Operations({_product(eqn, moved): 1}))
    elif (flops := cudnn.flops(name, shapes, eqn.params)) is not None:
        keys, width = shapes[1][1], shapes[0][-1]
        attention = Attention(keys, width, flops, cudnn.is_gradient(name))
        found.add(Operations(attentions={attention: 1}))
    elif name.startswith("scatter"):  # in place
        found.moved += 3 * bytes_of(eqn.invars[2])
    else:
        found.moved += moved


def _product(eqn: JaxprEqn, moved: int) -> Product:
    left, right = map(array_of, eqn.invars[:2])
    itemsize = max(left.dtype.itemsize, right.dtype.itemsize)
    if eqn.primitive.name == "dot_general":
        (contract, _), (batch, _) = eqn.params["dimension_numbers"]
        inner, groups = (prod(left.shape[dim] for dim in dims) for dims in (contract, batch))
        rows = prod(left.shape) // (inner * groups)
        return Product(itemsize, groups, rows, inner, prod(right.shape) // (inner * groups), moved)
    groups = prod(array_of(eqn.invars[2]).shape)
    if eqn.primitive.name == grouped_fp8.NAME:
        flops, inner = grouped_fp8.flops(left.shape, right.shape), left.shape[-1]
    else:
        flops, inner = (
            _ragged_flops(eqn),
            prod(
                left.shape[dim]
                for dim in eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
            ),
        )
    rows = prod(left.shape) // inner
    columns = flops // (2 * rows * inner)
    if len(right.shape) == 3:  # every group has its own matrix, and a share of the rows
        return Product(itemsize, groups, rows / groups, inner, columns, moved)
    return Product(itemsize, groups, rows, inner / groups, columns, moved)


def _ragged_flops(eqn: JaxprEqn) -> int:
    """FLOPs of a grouped product, of each row with the matrix of its group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    left, right = (array_of(var).shape for var in eqn.invars[:2])
    known = {*contract, *batch, *numbers.rhs_group_dimensions}
    return 2 * prod(left) * prod(size for dim, size in enumerate(right) if dim not in known)


def _along_rows(eqn: JaxprEqn) -> bool:
    """Whether a reduction is over the last dims alone, within the rows that a kernel reads."""
    axes, rank = eqn.params.get("axes", ()), len(array_of(eqn.invars[0]).shape)
    return sorted(axes) == list(range(rank - len(axes), rank)) and len(axes) < rank


def _renamed(steps: list[Equation]) -> dict[JaxprValue, JaxprValue]:
    """What values of equations that copy nothing are other names of.

    A product also reads a transposed operand where it is, and may scale its result.
    """
    same: dict[JaxprValue, JaxprValue] = {}
    products = {value for step in steps if step.name.startswith(_PRODUCTS) for value in step.makes}
    for step in steps:
        first = step.reads and same.get(step.reads[0], step.reads[0])
        is_scaled = step.name == "mul" and first in products and _is_scaled(step)
        if step.name in _RENAMES or is_scaled:
            same |= {new: same.get(old, old) for new, old in zip(step.makes, step.reads)}
    transposed = {
        step.makes[0]: same.get(step.reads[0], step.reads[0])
        for step in steps
        if step.name == "transpose"
    }
    others = {
        same.get(value, value)
        for step in steps
        if not step.name.startswith(_PRODUCTS)
        for value in step.reads
    }
    return same | {new: old for new, old in transposed.items() if new not in others}


def _is_scaled(step: Equation) -> bool:
    """Whether a product of two values has the size of the first, and the second is one number."""
    return all(prod(array_of(var).shape) == 1 for var in step.eqn.invars[1:])
