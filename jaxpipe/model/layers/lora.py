"""Low-rank adapters of a decoder whose own parameters are frozen (Hu et al. 2021, "LoRA").

A layer's product x w becomes x w + alpha / rank * drop(x) a b, with a `[in, rank]` and b
`[rank, out]`. Adapters are the parameters `lora/<name of w>/a` and `/b` of their layer. Products
with experts' matrices have an adapter per expert, `[E, in, rank]` and `[E, rank, out]`.

No gradient of w is computed: w is frozen (`ParamSpec.trained`), and the products with a and b stand
beside the one with w.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.core.contract import Context, LayerOutput, StageFunctions
from jaxpipe.core.contract.devices import OneDevice
from jaxpipe.core.contract.layer import PRODUCT
from jaxpipe.core.contract.parameter import TP, ParamSpec
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.layers.dropout import Dropout, Masks
from jaxpipe.model.layers.fp8 import Precision
from jaxpipe.model.layers.parts import PLAIN_DOT, Dot
from jaxpipe.model.loss import LOGPROBS, ScoreOptions, TokenScores

Tree = Any
NAME = "lora"  # of the adapters among a layer's parameters
_SAMPLES = "samples"
ParamPath = tuple[str, ...]
# Weights of which a layer multiplies by the columns of its own heads if all devices have all heads.
_BY_HEAD = "wk", "wv"
_OF_LATENTS = "wkv_b"  # multiplies the latents of all keys, where these are passed on as latents


class Adapter(NamedTuple):
    """The two matrices of an adapter."""

    a: Any
    b: Any


@dataclass(frozen=True)
class Adapters:
    """Which products have adapters, and their size.

    Attributes:
      rank: inner width of an adapter.
      alpha: adapters count alpha / rank times.
      targets: names of weights, as a layer passes them to `Dot`; empty: all of them.
      dropout: rate in training, of what an adapter multiplies.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank

    def paths(self, specs: Tree) -> Iterator[tuple[ParamPath, ParamSpec]]:
        """Yield path and spec of the weights of a layer that have adapters."""
        for path, spec in jax.tree.flatten_with_path(specs)[0]:
            names = tuple(key.key for key in path)
            is_target = not self.targets or product_of(names) in self.targets
            if is_target and names[-1].startswith("w") and spec.matrix is not None:
                yield names, spec


def product_of(path: ParamPath) -> str:
    """The name under which a layer passes the weight at a path to `Dot`.

    >>> product_of(("attn", "wq")), product_of(("moe", "experts", "w_up"))
    ('wq', 'expert_up')
    """
    return path[-1].replace("w_", "expert_", 1) if "experts" in path else path[-1]


@dataclass(frozen=True)
class LoraDecoder:
    """A decoder with adapters; it has the functions of a `Model`.

    Raises `ValueError` where a target is no weight of the model, and where adapters of experts, or
    of latents of other devices or slices, should drop inputs, there are more tp devices than heads
    of keys and values with adapters, or a layer has several weights of one name.

    Attributes:
      base: the decoder, all of whose parameters are frozen.
      adapters: which products have adapters.
    """

    base: CausalDecoder
    adapters: Adapters

    def __post_init__(self) -> None:
        chosen = [product_of(path) for path, _ in self._every_path(self.adapters)]
        known = self.base.products
        if unknown := [name for name in (*self.adapters.targets, *chosen) if name not in known]:
            raise ValueError(
                f"lora.targets has {unknown[0]!r}, or is left out for all, but the products of the "
                f"layers are those of {', '.join(sorted(known))}: name some of these."
            )
        for kind in self.base.kinds:
            names = [product_of(path) for path, _ in self.adapters.paths(self.base.leaves[kind])]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(
                    f"lora.rank={self.adapters.rank} on layers that have several weights "
                    f"{twice[0]!r}, which adapters cannot tell apart: set model.mtp_depth to 0 or "
                    f"1, and model.index_group to 1, or leave {twice[0]} out of lora.targets."
                )
        for path, spec in self._every_path(self.adapters):
            name, sharing = product_of(path), self.base.sharing
            sequence, slices = sharing.sequence, sharing.slices
            passes_latents = not sequence.exchanges_heads and max(sequence.size, slices) > 1
            placeless = "of experts" if "experts" in path else ""
            if name == _OF_LATENTS and passes_latents:
                placeless = f"with parallel.cp={sequence.size} and {slices} slices of a sequence"
            if placeless and self.adapters.dropout:
                raise ValueError(
                    f"lora.dropout={self.adapters.dropout} with an adapter of {name}: the inputs "
                    f"{placeless} have no positions to draw masks by; set lora.dropout=0, or "
                    f"leave {name} out of lora.targets."
                )
            if TP in spec.partial_grad_axes and name in _BY_HEAD:
                raise ValueError(
                    f"an adapter of {name}, of which every device has all heads: parallel.tp="
                    f"{sharing.devices.size} must divide model.n_kv_heads, or leave {name} out "
                    f"of lora.targets."
                )

    def with_options(self, **options: Mapping[str, Any]) -> Self:
        """See `CausalDecoder.with_options`."""
        return replace(self, base=self.base.with_options(**options))

    def _every_path(self, adapters: Adapters) -> Iterator[tuple[ParamPath, ParamSpec]]:
        for kind in self.base.kinds:
            yield from adapters.paths(self.base.leaves[kind])

    def init_embed_head(self, key: jax.Array) -> Tree:
        """Initial values of the base's parameters that belong to no layer."""
        return self.base.init_embed_head(key)

    def init_layer(self, key: jax.Array, index: jax.Array | int, kind: str = "layer") -> Tree:
        """Initial values of a layer, and of its adapters (`init_adapter`)."""
        layer, flat = self.base.init_layer(key, index, kind), {}
        for path, spec in self.adapters.paths(self.base.leaves[kind]):
            own = jax.random.fold_in(key, index)
            flat[path] = init_adapter(own, path, spec.shape, self.adapters.rank)._asdict()
        return layer | {NAME: unflatten_dict(flat)}

    @cached_property
    def functions(self) -> StageFunctions:
        """The base's functions with adapters; all parameters but these are frozen."""
        functions = self.base.functions
        kinds = {
            name: replace(
                kind,
                layer=partial(self._layer, kind=name),
                param_specs=self._specs(kind.param_specs),
            )
            for name, kind in functions.kinds_by_name.items()
        }
        keys = functions.batch_keys
        keys += (_SAMPLES,) * (self.adapters.dropout > 0 and _SAMPLES not in keys)
        embed_head = _freeze(functions.embed_head_specs)
        return replace(functions, kinds=kinds, embed_head_specs=embed_head, batch_keys=keys)

    def logits(self, embed_head: Tree, x: jax.Array) -> jax.Array:
        """See `CausalDecoder.logits`."""
        return self.base.logits(embed_head, x)

    def next_logits(self, embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        """See `CausalDecoder.next_logits`."""
        return self.base.next_logits(embed_head, x, rows)

    def token_scores(
        self, embed_head: Tree, x: jax.Array, rows: Tree, options: ScoreOptions = LOGPROBS
    ) -> TokenScores:
        """See `CausalDecoder.token_scores`."""
        return self.base.token_scores(embed_head, x, rows, options)

    def _specs(self, specs: Tree) -> Tree:
        own = {
            path: adapter_specs(spec, self.adapters.rank)._asdict()
            for path, spec in self.adapters.paths(specs)
        }
        return _freeze(specs) | {NAME: unflatten_dict(own)}

    def _layer(self, params: Tree, x: jax.Array, context: Context, kind: str) -> LayerOutput:
        base = {name: leaf for name, leaf in params.items() if name != NAME}
        specs = self.base.leaves[kind]
        adapters = {
            product_of(path): _at(params[NAME], path) for path, _ in self.adapters.paths(specs)
        }
        local = {
            product_of(path) for path, spec in self.adapters.paths(specs) if (TP, 0) in spec.sharded
        }
        drop = self._dropping(x, context, local)
        adapted = _Adapted(self.base.ops.precision, adapters, self.adapters.scale, drop)
        decoder = self.base.with_options(ops={"precision": adapted})
        output = decoder.layer(base, x, context, kind)
        if unused := adapters.keys() - adapted.used:
            raise ValueError(
                f"lora.targets: a layer of the kind {kind!r} does not pass {min(unused)} to `Dot`, "
                f"so that it can have no adapter: leave it out."
            )
        return output

    def _dropping(
        self, x: jax.Array, context: Context, local: set[str]
    ) -> Callable[[jax.Array, str], jax.Array]:
        """Dropout of the input of a product; of those in `local` a device has its own columns."""
        rate, rows = self.adapters.dropout, context.rows
        if not rate or _SAMPLES not in rows:
            return lambda inputs, name: inputs
        base = self.base
        masks = Masks.of(
            Dropout(seed=base.ops.seed), rows[_SAMPLES][:, 0], context.index,
            base._places(rows, base._length(x)), base.sharing.devices,
        )  # fmt: skip
        return lambda inputs, name: masks.inputs(inputs, name, rate, local=name in local)


@dataclass(frozen=True)
class LoraDot(Dot):
    """Products with adapters beside them.

    Attributes:
      base: multiplies with the frozen weights.
      given: adapters by the name of their product.
      scale: factor of their products.
      drop: drops inputs of the product of a name.
      plain: multiplies with adapters.
      used: gets the names of the products that were computed with an adapter.
    """

    base: Dot
    given: Mapping[str, Adapter]
    scale: float
    drop: Callable[[jax.Array, str], jax.Array]
    used: set[str]
    plain: Dot = PLAIN_DOT

    @property
    def adds_up(self) -> bool:
        """Whether the gradients of the frozen weights' products may be added (`Dot.adds_up`)."""
        return self.base.adds_up

    def __call__(self, x: jax.Array, **weights: jax.Array) -> tuple[jax.Array, ...]:
        """Multiply as `Dot` does, and add the adapters' products."""
        products = self.base(x, **weights)
        return tuple(self._added(name, x, y) for name, y in zip(weights, products))

    @property
    def row_multiple(self) -> int:
        """The row multiple of the frozen weights' products (`Dot.row_multiple`)."""
        return self.base.row_multiple

    def grouped(self, product: Callable[..., jax.Array], sizes_E: jax.Array) -> Dot:
        """The same products, of rows with their groups' matrices."""
        base, plain = (dot.grouped(product, sizes_E) for dot in (self.base, self.plain))
        return replace(self, base=base, plain=plain)

    def _added(self, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
        if name not in self.given:
            return y
        self.used.add(name)
        adapter = self.given[name]
        (low,) = self.plain(self.drop(x, name), a=adapter.a)
        (up,) = self.plain(low, b=adapter.b)
        return checkpoint_name(y + self.scale * up, PRODUCT)  # stored, and neither product is


@dataclass(frozen=True)
class _Adapted(Precision):
    """The precision of frozen weights, with a layer's adapters beside them."""

    frozen: Precision
    given: Mapping[str, Adapter]
    scale: float
    drop: Callable[[jax.Array, str], jax.Array]
    used: set[str] = field(default_factory=set)

    def dot(self, products: tuple[str, ...], devices: OneDevice, context: Context) -> Dot:
        """The `Dot` of a layer."""
        base = self.frozen.dot(products, devices, context)
        return LoraDot(base, self.given, self.scale, self.drop, self.used)


def adapter_shapes(shape: tuple[int, ...], rank: int) -> Adapter:
    """Shapes of the adapter of a weight `[..., in, out]`."""
    *experts, inputs, outputs = shape
    return Adapter((*experts, inputs, rank), (*experts, rank, outputs))


def init_adapter(key: jax.Array, path: ParamPath, shape: tuple[int, ...], rank: int) -> Adapter:
    """Initial adapter of a weight: a is uniform as torch's `Linear`, b zero, as in PEFT.

    Args:
      key: of the layer.
      path: of the weight in its layer.
      shape: of the weight.
      rank: inner width of the adapter.
    """
    shapes, bound = adapter_shapes(shape, rank), shape[-2] ** -0.5
    own = jax.random.fold_in(key, zlib.crc32("/".join((NAME, *path)).encode()))
    a = jax.random.uniform(own, shapes.a, jnp.float32, -bound, bound)
    return Adapter(a, jnp.zeros(shapes.b, jnp.float32))


def adapter_specs(spec: ParamSpec, rank: int) -> Adapter:
    """Specs of the adapter of a weight.

    `a` is sharded with the weight's inputs and `b` with its outputs. The other one is replicated on
    those devices, and its gradient is partial: each has some of the outputs, or of the inputs.
    """
    dims = len(spec.shape)
    axes = {dim: tuple(axis for axis, of in spec.sharded if of == dim) for dim in range(dims)}

    def one(kept: int, other: int, shape: tuple[int, ...]) -> ParamSpec:
        sharded = tuple((axis, dim) for axis, dim in spec.sharded if dim != other)
        partial_axes = (*spec.partial_grad_axes, *axes[other])
        return ParamSpec(sharded, partial_axes, shape, matrix=spec.matrix)

    shapes = adapter_shapes(spec.shape, rank)
    return Adapter(one(dims - 2, dims - 1, shapes.a), one(dims - 1, dims - 2, shapes.b))


def merge_adapter(weight: Any, adapter: Adapter, scale: float) -> Any:
    """The weight that multiplies as the frozen one and its adapter do together."""
    return weight + scale * (adapter.a @ adapter.b)


def _freeze(specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: replace(spec, trained=False), specs)


def _at(tree: Tree, path: ParamPath) -> Adapter:
    for key in path:
        tree = tree[key]
    return Adapter(**tree)
