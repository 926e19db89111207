"""Tensor parallelism for a function that was written for one device.

A Flax module calls no collective. `partition` traces its forward and its gradient at full shapes
and evaluates both on shards: every value is replicated over tp or sharded along one dim, beginning
with the parameters, and each equation determines how its result is sharded (as GSPMD does: Xu et
al. 2021). A matrix product that sums over a sharded dim is followed by an all-reduce, so an MLP or
an attention whose metadata names tp as in Megatron-LM (Shoeybi et al. 2019) has Megatron's
all-reduces and no other collective. An equation without a rule gathers its operands first: slower,
never wrong. XLA's own partitioner cannot be used here, because its collectives may span pipeline
ranks, which run different layers at the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpipe.core.mesh import TP
from jaxpipe.core.split.jaxpr import shape_of, trace_flat

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["dim"])
@dataclass(frozen=True)
class Shard:
    """A value on one device: replicated over tp, or this device's shard along `dim`."""

    value: jax.Array
    dim: int | None = None

    @property
    def sharded_dim(self) -> int:
        """`dim` of a value that is a shard."""
        assert self.dim is not None
        return self.dim

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full array."""
        tp, shape = lax.axis_size(TP), jnp.shape(self.value)
        return tuple(size * tp if i == self.dim else size for i, size in enumerate(shape))

    def gathered(self) -> jax.Array:
        """The full array."""
        if self.dim is None:
            return self.value
        return lax.all_gather(self.value, TP, axis=self.dim, tiled=True)

    def along(self, dim: int | None) -> jax.Array:
        """This device's shard along `dim`; None: the full array."""
        if self.dim == dim:
            return self.value
        full = self.gathered()
        if dim is None:
            return full
        size = full.shape[dim] // lax.axis_size(TP)
        return lax.dynamic_slice_in_dim(full, lax.axis_index(TP) * size, size, dim)


def partition(
    function: Callable[[Tree, Tree, Tree], jax.Array], specs: Tree, tp: int
) -> Callable[[Tree, Tree, Tree], jax.Array]:
    """Return `function(params, x, data)` as `tp` devices compute it, each with its shards.

    Args:
      function: differentiable in params and x, not in data; x, data and the result are replicated.
      specs: `ParamSpec` of every parameter.
      tp: number of devices; 1: the function itself.
    """
    if tp == 1:
        return function

    def forward(params: Tree, x: Tree, data: Tree) -> tuple[jax.Array, Tree]:
        shards = jax.tree.map(lambda spec, leaf: Shard(leaf, _dim(spec)), specs, params)

        def pulled(params: Tree, x: Tree, data: Tree) -> tuple[jax.Array, Tree]:
            return jax.vjp(lambda params, x: function(params, x, data), params, x)

        y, pull = _evaluate(pulled, shards, *jax.tree.map(Shard, (x, data)))
        return y.gathered(), pull

    def backward(pull: Tree, dy: jax.Array) -> tuple[Tree, Tree, None]:
        dparams, dx = _evaluate(lambda pull, dy: pull(dy), pull, Shard(dy))
        dparams = jax.tree.map(lambda spec, leaf: leaf.along(_dim(spec)), specs, dparams)
        return dparams, jax.tree.map(Shard.gathered, dx, is_leaf=_is_shard), None

    shared = jax.custom_vjp(lambda params, x, data: forward(params, x, data)[0])
    shared.defvjp(forward, backward)
    return shared


def _dim(spec: Any) -> int | None:
    return dict(spec.sharded).get(TP)


def _is_shard(node: Any) -> bool:
    return isinstance(node, Shard)


def _local(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    tp = lax.axis_size(TP)
    return tuple(size // tp if i == dim else size for i, size in enumerate(shape))


def _evaluate(function: Callable[..., Tree], *args: Tree) -> Tree:
    """Return the result of `function` as a tree of `Shard`s; args are such trees."""
    structure = None

    def flat(*full: Tree) -> list[Any]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(function(*full))
        return leaves

    full = jax.tree.map(
        lambda shard: jax.ShapeDtypeStruct(shard.full_shape, shard.value.dtype),
        args, is_leaf=_is_shard,
    )  # fmt: skip
    closed = trace_flat(flat, *full)
    jaxpr, shards = closed.jaxpr, jax.tree.leaves(args, is_leaf=_is_shard)
    values: dict[Var, Shard] = dict(zip(jaxpr.invars, shards))
    values |= dict(zip(jaxpr.constvars, map(Shard, closed.consts)))

    def read(var: Any) -> Shard:
        return Shard(var.val) if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        result, rule = None, _RULES.get(eqn.primitive.name)
        if rule and any(operand.dim is not None for operand in operands):
            result = rule(eqn, *operands)
        if result is None:
            result = [Shard(out) for out in _bind(eqn, *(one.gathered() for one in operands))]
        values.update(zip(eqn.outvars, result))
    return jax.tree.unflatten(structure, map(read, jaxpr.outvars))


def _bind(eqn: JaxprEqn, *operands: jax.Array, **changed: Any) -> list[jax.Array]:
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    result = eqn.primitive.bind(*operands, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


# A rule takes an equation and its operands, at least one of them sharded, and returns the results,
# or None: the rule does not apply, and the operands are gathered.


def _elementwise(eqn: JaxprEqn, *operands: Shard) -> list[Shard]:
    dim = next(operand.dim for operand in operands if operand.dim is not None)

    def own(operand: Shard) -> jax.Array:
        shape = operand.full_shape
        return operand.along(dim) if shape and shape[dim] > 1 else operand.gathered()

    return [Shard(result, dim) for result in _bind(eqn, *map(own, operands))]


def _product(eqn: JaxprEqn, left: Shard, right: Shard) -> list[Shard]:
    contracted, batch = (list(zip(*pairs)) for pairs in eqn.params["dimension_numbers"])
    both = [(a, b) for a, b in batch + contracted if left.dim == a or right.dim == b]
    both.sort(key=lambda pair: (left.dim, right.dim) != pair)
    if both:
        a, b = both[0]
        (result,) = _bind(eqn, left.along(a), right.along(b))
        if both[0] in batch:
            return [Shard(result, batch.index(both[0]))]
        return [Shard(lax.psum(result, TP))]
    if left.dim is not None:
        (result,) = _bind(eqn, left.value, right.gathered())
        summed_or_batch = [a for a, _ in batch + contracted]
        free = [dim for dim in range(left.value.ndim) if dim not in summed_or_batch]
        return [Shard(result, len(batch) + free.index(left.dim))]
    (result,) = _bind(eqn, left.value, right.value)
    summed_or_batch = [b for _, b in batch + contracted]
    free = [dim for dim in range(right.value.ndim) if dim not in summed_or_batch]
    return [Shard(result, result.ndim - len(free) + free.index(right.sharded_dim))]


def _transpose(eqn: JaxprEqn, x: Shard) -> list[Shard]:
    (result,) = _bind(eqn, x.value)
    return [Shard(result, eqn.params["permutation"].index(x.dim))]


def _broadcast(eqn: JaxprEqn, x: Shard, *_: Shard) -> list[Shard]:
    dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    dim = dims[x.dim]
    return [Shard(lax.broadcast_in_dim(x.value, _local(shape, dim), dims), dim)]


def _reshape(eqn: JaxprEqn, x: Shard, *_: Shard) -> list[Shard] | None:
    """The result is sharded along a dim with the same outer elements, if tp divides its size."""
    before, after = x.full_shape, shape_of(eqn.outvars[0]).shape
    for dim, size in enumerate(after):
        if prod(after[:dim]) == prod(before[: x.dim]) and size > 1 and not size % lax.axis_size(TP):
            return [Shard(lax.reshape(x.value, _local(after, dim)), dim)]
    return None


def _reduction(collective: Callable[..., jax.Array], eqn: JaxprEqn, x: Shard) -> list[Shard]:
    axes, (result,) = eqn.params["axes"], _bind(eqn, x.value)
    if x.dim in axes:
        return [Shard(collective(result, TP))]
    return [Shard(result, x.dim - sum(axis < x.dim for axis in axes))]


def _slice(eqn: JaxprEqn, x: Shard) -> list[Shard] | None:
    dim = x.sharded_dim
    if shape_of(eqn.outvars[0]).shape[dim] != x.full_shape[dim]:
        return None
    limits = _local(eqn.params["limit_indices"], dim)
    return [Shard(result, dim) for result in _bind(eqn, x.value, limit_indices=limits)]


def _along_another(name: str, eqn: JaxprEqn, *operands: Shard) -> list[Shard] | None:
    """Operations along one dim, which the parameter `name` gives."""
    dims = {operand.dim for operand in operands} - {None}
    return None if eqn.params[name] in dims else _elementwise(eqn, *operands)


def _pad(eqn: JaxprEqn, x: Shard, value: Shard) -> list[Shard] | None:
    return None if any(eqn.params["padding_config"][x.dim]) else _elementwise(eqn, x, value)


_ELEMENTWISE = (
    "abs add add_any and atan2 cbrt clamp convert_element_type copy cos cosh div eq erf erf_inv "
    "erfc exp exp2 expm1 ge gt integer_pow is_finite le log log1p logistic lt max min mul name ne "
    "neg nextafter not one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin "
    "sinh sqrt square stop_gradient sub tan tanh xor"
)
_RULES: dict[str, Callable[..., list[Shard] | None]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    "dot_general": _product,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "reduce_sum": partial(_reduction, lax.psum),
    "reduce_max": partial(_reduction, lax.pmax),
    "reduce_min": partial(_reduction, lax.pmin),
    "slice": _slice,
    "pad": _pad,
    "concatenate": partial(_along_another, "dimension"),
    "split": partial(_along_another, "axis"),
    "cumsum": partial(_along_another, "axis"),
}
