"""The kernels of a card's table, each as a timed loop, and the grid of their sizes.

Every application reads a value of the one before, and a barrier stands between two, so that XLA
neither hoists nor fuses them.
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.planning.cost.card_table import (
    Itemsize,
    MeasuredAttention,
    MeasuredCopy,
    MeasuredProduct,
)
from jaxpipe.run.measure.timed_loop import TimedLoop, iterations_of, repeated

Tree = Any
_DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}


class ProductKernel(NamedTuple):
    """Products of `groups` pairs, [rows, inner] with [inner, columns], as of layers and experts."""

    itemsize: Itemsize
    groups: int
    rows: int
    inner: int
    columns: int
    applied: int = 4
    launches: int = 2  # that are not part of the entry: the kernel's, and that of `_reads`

    def start(self) -> tuple[Tree, Tree]:
        """The state, x and y, and the matrices."""
        dtype = _DTYPES[self.itemsize]
        x = _uniform(0, (self.groups, self.rows, self.inner)).astype(dtype)
        matrices = _uniform(1, (self.groups, self.inner, self.columns)).astype(dtype)
        return (x, self._multiply(x, matrices)), matrices

    def apply(self, state: Tree, matrices: Tree) -> Tree:
        """One product."""
        y = lax.optimization_barrier(self._multiply(state[0], matrices))
        return _reads(state[0], y), y

    def _multiply(self, x: jax.Array, matrices: jax.Array) -> jax.Array:
        result = _DTYPES[max(2, self.itemsize)]
        dims = ((2,), (1,)), ((0,), (0,))
        return lax.dot_general(x, matrices, dims, preferred_element_type=result)

    def measured(self, seconds: float, source: str) -> MeasuredProduct:
        """The entry of the table."""
        sizes = self.itemsize, self.groups, self.rows, self.columns, self.inner
        one = MeasuredProduct(*sizes, tflops=1.0, source=source)
        tflops = one.product.flops / seconds / 1e12
        return MeasuredProduct(*sizes, tflops=tflops, source=source)

    def __str__(self) -> str:
        groups = f"{self.groups} x " if self.groups > 1 else ""
        dtype = jnp.dtype(_DTYPES[self.itemsize]).name
        return f"product {groups}{self.rows} x {self.inner} x {self.columns} {dtype}"


class AttentionKernel(NamedTuple):
    """Causal attention of `tokens` in sequences of `keys`, or its gradient."""

    tokens: int
    keys: int
    width: int
    heads: int
    gradient: bool
    applied: int = 4
    launches: int = 2  # that are not part of the entry: the kernel's, and that of `_reads`

    def start(self) -> tuple[Tree, Tree]:
        """The state, with q or the gradient of the output in it, and what else is read."""
        shape = self.tokens // self.keys, self.keys, self.heads, self.width
        q, k, v, dy = (_uniform(seed, shape).astype(jnp.bfloat16) for seed in range(4))
        if not self.gradient:
            return (q, q), (k, v)
        _, pull = jax.vjp(_attend, q, k, v)
        return (dy, (q, k, v)), pull

    def apply(self, state: Tree, fixed: Tree) -> Tree:
        """One attention, or one gradient."""
        made = fixed(state[0]) if self.gradient else _attend(state[0], *fixed)
        made = lax.optimization_barrier(made)
        return _reads(state[0], jax.tree.leaves(made)[0]), made

    def measured(self, seconds: float, source: str) -> MeasuredAttention:
        """The entry of the table; half of all scores count, in two products or five."""
        products = 5 if self.gradient else 2
        flops = products * self.tokens * self.keys * self.heads * self.width
        return MeasuredAttention(
            self.keys, self.width, self.gradient, flops / seconds / 1e12, source
        )

    def __str__(self) -> str:
        what = "gradient of attention" if self.gradient else "attention"
        return f"{what} of {self.keys} keys, heads of {self.width}"


class CopyKernel(NamedTuple):
    """An elementwise kernel on arrays of `values` float32 values.

    As an update, it reads and writes parameters and both moments, and reads gradients; otherwise it
    reads and writes one array.
    """

    values: int
    update: bool = False
    applied: int = 32
    launches: int = 0

    def start(self) -> tuple[Tree, Tree]:
        """The arrays that are written, and the gradients."""
        arrays = [_uniform(seed, (self.values,)) for seed in range(4 if self.update else 1)]
        return (arrays[0], *(jnp.abs(one) for one in arrays[1:3])), tuple(arrays[3:])

    def apply(self, state: Tree, fixed: Tree) -> Tree:
        """One pass over the arrays."""
        if not self.update:
            return lax.optimization_barrier((state[0] + 1,))
        (values, mean, square), (gradient,) = state, fixed
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient * gradient
        return lax.optimization_barrier((values - mean * lax.rsqrt(square + 1), mean, square))

    def measured(self, seconds: float, source: str) -> MeasuredCopy:
        """The entry of the table."""
        return MeasuredCopy((7 if self.update else 2) * 4 * self.values, seconds, source)

    def __str__(self) -> str:
        return f"{'update' if self.update else 'copy'} of {self.values} float32 values"


Kernel = ProductKernel | AttentionKernel | CopyKernel


def needed(rows: int, itemsizes: tuple[Itemsize, ...]) -> Iterator[Kernel]:
    """The kernels without which a table has no laws: of the first of `itemsizes`, see `grid`."""
    large = 4 * rows * rows
    yield from (CopyKernel(rows), CopyKernel(large), CopyKernel(large, update=True))
    for inner in (rows, rows // 4, 4 * rows):
        yield ProductKernel(itemsizes[0], 1, rows, inner, 2 * rows)
    attention = partial(_attention, rows)
    yield from (attention(rows, 128, gradient=gradient) for gradient in (False, True))
    yield from (attention(rows // 8, 128, gradient=gradient) for gradient in (False, True))
    yield attention(rows, 64, gradient=True)


def grid(rows: int, itemsizes: tuple[Itemsize, ...]) -> Iterator[Kernel]:
    """The other kernels, the most important first.

    Sizes span what layers have: rows of a microbatch and of an expert, widths of tp shards to those
    of large models, a vocabulary, sequences of 512 to 16,384 tokens with 4,096 rows.

    Args:
      rows: of most products.
      itemsizes: of operands; those of the first have all sizes.
    """
    first, *others = itemsizes
    for itemsize in others:
        for inner in (rows, rows // 4, 4 * rows):
            yield ProductKernel(itemsize, 1, rows, inner, 2 * rows)
    for inner in (rows // 2, 2 * rows, rows // 8):
        yield ProductKernel(first, 1, rows, inner, 2 * rows)
    for groups, per_expert in ((8, rows // 8), (8, rows // 32), (32, rows // 8), (8, rows // 2)):
        for itemsize in itemsizes:
            yield ProductKernel(itemsize, groups, per_expert, rows // 2, rows // 2)
    for columns in (rows // 2, rows, 8 * rows, 32 * rows):
        yield ProductKernel(first, 1, rows, rows, columns)
    for few in (rows // 4, rows // 16, 4 * rows):
        yield ProductKernel(first, 1, few, rows, 2 * rows)
    for keys, width in (
        (2 * rows, 128), (rows // 2, 128), (4 * rows, 128), (rows // 4, 128), (rows, 64),
        (rows // 8, 64), (4 * rows, 64),
    ):  # fmt: skip
        for gradient in (False, True):
            if (keys, width, gradient) != (rows, 64, True):
                yield _attention(rows, keys, width, gradient=gradient)
    yield CopyKernel(rows * rows)


def _attention(rows: int, keys: int, width: int, *, gradient: bool) -> AttentionKernel:
    return AttentionKernel(4 * rows, keys, width, max(1, rows // 2 // width), gradient)


class TimedKernel:
    """The timed loop of a kernel."""

    def __init__(self, kernel: Kernel):
        iterations = iterations_of(jax.default_backend())

        def run(state: Tree, fixed: Tree, iteration: jax.Array) -> Tree:
            for _ in range(kernel.applied):
                state = kernel.apply(state, fixed)
            return state

        state, fixed = jax.jit(kernel.start)()
        loop = jax.jit(repeated(run, iterations), donate_argnums=0)
        self._loop = TimedLoop(loop, state, fixed, iterations)
        self._applied = kernel.applied

    def seconds(self) -> float:
        """Time of one application [s]."""
        return self._loop.seconds() / self._applied


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    how: Literal["xla", "cudnn"] = "xla" if jax.default_backend() == "cpu" else "cudnn"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)


def _reads(x: jax.Array, y: jax.Array) -> jax.Array:
    """x with a value of y in place of its first."""
    return x.at[(0,) * x.ndim].set(y[(0,) * y.ndim].astype(x.dtype))


def _uniform(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Float32 values in [-1, 1) in no order, which compile faster than random ones.

    Values matter: products of zeros take less power, and so run at a higher clock.
    """
    number = lax.iota(jnp.uint32, prod(shape)) + jnp.uint32(seed)
    weyl = lax.bitcast_convert_type(number * jnp.uint32(0x9E3779B1), jnp.int32)
    return (weyl.astype(jnp.float32) / 2.0**31).reshape(shape)
