"""Flax modules as pure functions of their parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import FlaxError
from jax.sharding import PartitionSpec

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.mesh import TP

Tree = Any


@dataclass(frozen=True, eq=False)
class ModuleFunction:
    """A Flax module as a function of its parameters.

    Attributes:
      name: how errors name the module.
      graph: the module without its arrays.
      shapes: shapes and dtypes of its parameters, a nested dict.
      types: their types, `nnx.Param` or a subclass.
      constants: its other arrays, which a call may read but not change.
      specs: `ParamSpec` of every parameter: sharded over tp along the first dim for which the Flax
        metadata (`out_sharding`, its logical axes resolved by their rules) names the mesh axis tp.
    """

    name: str
    graph: nnx.GraphDef
    shapes: Tree
    types: Tree
    constants: Tree
    specs: Tree

    @classmethod
    def split(
        cls, name: str, module: Any, tp: int, partial_grad_axes: tuple[str, ...] = ()
    ) -> tuple["ModuleFunction", Tree]:
        """Split a module into a function and its parameters.

        Args:
          name: how errors name the module.
          module: an `nnx.Module`, or a dict of modules, which may share parameters.
          tp: number of devices that share each layer.
          partial_grad_axes: of the `ParamSpec`s.

        Raises `ValueError` for random state, and for a sharded dim that `tp` does not divide.
        """
        copy = nnx.clone(module)
        for _, node in nnx.iter_graph(copy):
            if isinstance(node, nnx.bridge.ToNNX):
                node.to_nnx__rngs = None  # what initialised a linen module; a call needs none
        graph, *states = nnx.split(copy, nnx.Param, nnx.RngState, ...)
        params, random, constants = map(nnx.to_pure_dict, states)
        if random:
            raise ValueError(
                f"{name} has random state, as dropout has, but B and W could not draw the same "
                f"numbers as F: build it without dropout, or write a LayerKind."
            )

        def spec(path: Any, named: PartitionSpec, param: jax.Array) -> ParamSpec:
            where, shape = name + jax.tree_util.keystr(path), param.shape
            axes = [(one,) if isinstance(one, str) else one or () for one in named]
            sharded = [dim for dim, names in enumerate(axes) if TP in names][:1]
            if sharded and shape[sharded[0]] % tp:
                raise ValueError(
                    f"{where} has shape {shape} and is sharded over tp along dim {sharded[0]}, "
                    f"which tp={tp} does not divide: change the size or the mesh."
                )
            matrix = (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None
            return ParamSpec(tuple((TP, dim) for dim in sharded), partial_grad_axes, matrix=matrix)

        is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        named = nnx.to_pure_dict(nnx.get_partition_spec(states[0]))
        function = cls(
            name,
            graph,
            shapes=jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), params),
            types=nnx.to_pure_dict(jax.tree.map(type, states[0], is_leaf=is_variable)),
            constants=jax.tree.map(np.asarray, constants),
            specs=jax.tree.map_with_path(spec, named, params, is_leaf=is_spec),
        )
        return function, params

    def module(self, params: Tree) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graph, params, jax.tree.map(jnp.asarray, self.constants))

    def __call__(
        self, params: Tree, *args: Any, part: Callable[[Any], Any] = lambda module: module
    ) -> Any:
        """Call the module, or the one that `part` takes from it.

        Raises `ValueError` where the call changes a variable, such as a running mean, or is not
        possible for a linen module as it is.
        """
        module = self.module(params)
        for _, node in nnx.iter_graph(module):
            # Linen would constrain the value to this sharding, but here it is a shard already.
            if isinstance(node, nnx.Variable) and node.has_metadata("linen_meta_type"):
                node.del_metadata("linen_meta_type")
        before = _leaves(module)
        try:
            result = part(module)(*args)
        except FlaxError as error:
            raise ValueError(
                f"{self.name} cannot be called ({str(error).partition(' (http')[0]}): a linen "
                f"module must be initialised by lazy_init(x), in its evaluation mode, and without "
                f"dropout."
            ) from error
        after = _leaves(module)
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before)):
            raise ValueError(
                f"{self.name} changes variables when it is called (batch statistics, a cache, sown "
                f"values), but microbatches may not depend on each other: use its evaluation mode, "
                f"or replace the module."
            )
        return result

    def equals(self, other: "ModuleFunction") -> bool:
        """Whether two modules differ only in the values of their parameters."""
        return self._identity == other._identity

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        bits = jax.tree.map(lambda one: (str(one.dtype), one.shape, one.tobytes()), self.constants)
        return self.graph, self.shapes, self.specs, bits


def _leaves(module: Any) -> list[jax.Array]:
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))


def check_modules(modules: Mapping[str, Any]) -> None:
    """Check that these are initialised Flax modules with variables of their own.

    Embedding and head may share theirs. Raises `ValueError`.
    """
    owners: dict[int, str] = {}
    for name, module in modules.items():
        if not isinstance(module, nnx.Module):
            raise ValueError(
                f"{name} is {type(module).__module__}.{type(module).__qualname__}, but must be an "
                f"nnx.Module; wrap a linen module: nnx.bridge.ToNNX(module, rngs).lazy_init(x)."
            )
        if isinstance(module, nnx.bridge.ToNNX) and not nnx.state(module, nnx.Param):
            raise ValueError(
                f"{name} is a linen module without parameters: call its lazy_init(x) first."
            )
        for _, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState):
                _check_variable(name, node)
            owner = owners.setdefault(id(node), name) if isinstance(node, nnx.Variable) else name
            if owner != name and {owner, name} != {"embed", "head"}:
                raise ValueError(
                    f"{owner} and {name} share a variable, but only embed and head may, since "
                    f"layers can be on different devices: give each its own."
                )


def _check_variable(name: str, variable: nnx.Variable) -> None:
    value, kind = variable.get_raw_value(), type(variable).__name__
    is_tree = value is not None and not jax.tree_util.all_leaves([value])
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_tree or is_key:
        what = "random key" if is_key else type(value).__name__
        raise ValueError(f"{name} has an nnx.{kind} that is a {what}, but it must be one array.")
    if hooks := [hook for hook in ("on_get_value", "on_set_value") if variable.has_metadata(hook)]:
        raise ValueError(
            f"{name} has an nnx.{kind} with {hooks[0]}, which a pipeline would not run: compute it "
            f"in the module's call."
        )
