"""The interface of a layer: what it reads and what it returns.

A layer is a pure function `layer(params, x, context) -> LayerOutput`. It is traced once and split
into F, B and W (`jaxpipe.core.split.split`); it never sees ticks, pipeline ranks or ring buffers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

Tree = Any  # a pytree, of arrays unless a docstring says otherwise
Half = tuple[Callable[["jax.Array"], Tree], "jax.Array"]  # F or a gradient, and its x or dy
Pair = Callable[[Half, Half], Iterable[Tree]]
POINT = "point of "  # a name with this prefix marks a point of a layer, not a value to be stored
EMBED_HEAD = "embed_head"
PRODUCT = "product"  # selective rematerialisation stores values of this name, like matrix products


class Context(NamedTuple):
    """What a layer reads besides its parameters and x, in F, B and W alike.

    A context is not differentiated, except for the floating-point leaves of `state`, `embed_head`,
    and the variables that the kind names in `LayerKind.statistics`.

    Attributes:
      rows: the microbatch's data: the leaves of the batch without their leading axis M.
      index: the layer's index in the model, an int32 scalar; None in the embedding and the head.
      state: the state that the previous sequence slice returned; None without sequence slices.
      variables: the model's state that is no parameter, the same in all microbatches of a step.
      embed_head: parameters of embedding and head, sharded over tp as they declare, and gathered
        over all other axes; None unless the kind reads them (`LayerKind.reads`).
    """

    rows: Tree
    index: "jax.Array | None" = None  # type: ignore[assignment]  # of a tuple it is a method
    state: Tree = None
    variables: Tree = None
    embed_head: Tree = None


class Aux(NamedTuple):
    """Auxiliary outputs of a layer; devices along tp must compute the same values.

    Every field is optional. All layers of a kind return the same names with the same shapes.

    Attributes:
      losses: by name a differentiated sum and the number of its terms, scalars; the number depends
        on the microbatch's rows alone. A step divides every layer's sum by the number of its terms
        in the whole batch (0 where there are none), and adds these means to the head's loss.
      sums: small arrays by name, summed over layers, microbatches and replicas.
      maxima: small arrays by name, reduced by elementwise maximum over the same three.
      per_example: numeric arrays `[B, ...]` by name, summed over layers; a step returns them for
        every microbatch, `[M, B, ...]`.
    """

    losses: Mapping[str, tuple["jax.Array", "jax.Array | int"]] = {}
    sums: Mapping[str, "jax.Array"] = {}
    maxima: Mapping[str, "jax.Array"] = {}
    per_example: Mapping[str, "jax.Array"] = {}

    @property
    def loss_sums(self) -> dict[str, "jax.Array"]:
        """The sums of the losses by name."""
        return {name: total for name, (total, _) in self.losses.items()}

    @property
    def loss_counts(self) -> dict[str, "jax.Array | int"]:
        """The number of terms of the losses by name."""
        return {name: count for name, (_, count) in self.losses.items()}


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
      y: of x's shape and dtype, `[B, L, D]` in a decoder.
      state: the state for the next sequence slice, with the structure of `context.state`; or None.
      aux: auxiliary outputs.

    A layer without state or auxiliary outputs returns `LayerOutput(y)`.
    """

    y: "jax.Array"
    state: Tree = None
    aux: Aux = Aux()


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer; the layers of a kind have parameters of the same shapes.

    Attributes:
      layer: `(params, x, context) -> LayerOutput`; y has x's shape and dtype.
      param_specs: a `ParamSpec` for every parameter, as a tree of the same structure; None: no
        parameter is sharded.
      state: `(x, rows) -> state` before the first sequence slice, all zeros; None: the kind does
        not support sequence slices. The backward of a layer may read the state that the layer
        returned, as later slices leave it, but not the state that it received. What a layer makes
        of the returned state alone is made again in B and never stored.
      recurrent: whether the state is small and replaced by every slice, as that of a recurrence:
        the backward then reads the state that the layer received, which F stores like x, and not
        the one that it returned.
      keep: names (`jax.ad_checkpoint.checkpoint_name`) of values that F stores under every
        rematerialisation policy because they must not be recomputed, such as the indices of a
        top-k.
      statistics: names of variables (which must then be a dict) whose cotangent carries a statistic
        of the backward pass instead of a gradient. A step returns in `Aux.maxima`, under the
        variable's name, its elementwise maximum, at least 0, over layers, microbatches, replicas
        and devices along tp.
      pair: `(forward, gradient) -> (outputs, outputs)`: runs F of such a layer and the gradient of
        a layer of another stage, where a schedule has both in one cell (DualPipe). Each is given as
        a function and its x or dy; the results are those of the two functions, in an order of
        their equations that the kind chooses. None: neither waits for the other.
      reads: what layers of this kind read besides their own parameters: ("embed_head",) for the
        parameters of embedding and head, in `Context.embed_head`. The step adds the gradients there
        to those of embedding and head.

    Raises:
      ValueError: `reads` names anything else.

    >>> from jaxpipe.core.contract.parameter import ParamSpec
    >>> def layer(params, x, context):
    ...     return LayerOutput(x + x @ params["up"])
    >>> LayerKind(layer, {"up": ParamSpec(matrix=(0, 1))}).keep
    ()
    """

    layer: Callable[[Tree, "jax.Array", Context], LayerOutput]
    param_specs: Tree = None
    state: Callable[["jax.Array", Tree], Tree] | None = None
    recurrent: bool = False
    keep: tuple[str, ...] = field(default=())
    statistics: tuple[str, ...] = field(default=())
    pair: Pair | None = None
    reads: tuple[str, ...] = field(default=())

    def __post_init__(self):
        if self.reads not in ((), (EMBED_HEAD,)):
            raise ValueError(
                f"LayerKind.reads={self.reads!r}: a layer can read the parameters of embedding and "
                f"head alone; give ({EMBED_HEAD!r},) or ()."
            )
