"""One contract for every layer: what it is given, and what it may give back.

A layer is a pure function `layer(params, x, context) -> LayerOutput`. It is traced once and cut
into F, B and W (`jaxpipe.pipeline.split`); it never sees ticks, ranks or rings.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

Tree = Any
Names = tuple[str, ...]
Rounds = Iterable[tuple[str | None, str | None]]
IN_FORWARD, IN_GRADIENT = "point of F: ", "point of a gradient: "  # before the names of points
PRODUCT = "product"  # the name of what selective rematerialisation stores, as it does products


class Context(NamedTuple):
    """What a layer is given beside its parameters and x, in F, B and W alike.

    Nothing of it is differentiated but the inexact leaves of `state`, and variables that the kind
    observes (`LayerKind.observed`).

    Attributes:
      rows: the microbatch's row data: the batch's leaves without their leading axis M.
      index: the layer's place in the whole model, an int32 scalar; None at the ends of the model.
      state: what the slices of a sequence leave for each other; None where sequences are whole.
      variables: the model's state that is no parameter, the same in all microbatches of a step.
    """

    rows: Tree
    index: "jax.Array | None" = None
    state: Tree = None
    variables: Tree = None


class Side(NamedTuple):
    """What a layer makes beside y; devices along tp must make it alike.

    A layer may leave out any of it, and layers of a kind make the same names in the same shapes.

    Attributes:
      loss: a scalar, a sum over the tokens that the layer saw. The step trains on its mean over the
        tokens of the whole batch (`StageFunctions.tokens`), which is added to the mean loss of the
        head. It is differentiated; None: none.
      sums: small arrays by name, added up over layers, microbatches and replicas.
      maxima: small arrays by name, of which the elementwise largest over all these is taken.
      rows: arrays of numbers `[B, ...]` by name, of every example, which are added up over layers
        and given back of every microbatch, `[M, B, ...]`.
    """

    loss: "jax.Array | None" = None
    sums: Mapping[str, "jax.Array"] = {}
    maxima: Mapping[str, "jax.Array"] = {}
    rows: Mapping[str, "jax.Array"] = {}


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
      y: of x's shape and dtype, `[B, L, D]` in a decoder.
      state: what it leaves for the next slice, of the form of `context.state`; None: nothing.
      side: what it makes beside.

    A layer without state or side outputs returns `LayerOutput(y)`.
    """

    y: "jax.Array"
    state: Tree = None
    side: Side = Side()


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer; the layers of a kind have parameters of the same shapes.

    Attributes:
      layer: `(params, x, context) -> LayerOutput`; y has x's shape and dtype.
      leaves: a `Leaf` for every parameter, as a tree of the same form; None: nothing is cut.
      state: `(x, rows) -> state` before the first slice, all zeros; None: sequences are whole. The
        gradient of a layer may read the state that it returns, as later slices leave it, but not
        the one that it is given.
      keep: names (`jax.ad_checkpoint.checkpoint_name`) of values that F stores whatever is
        rematerialised: what must not be computed twice, such as indices of a top-k.
      observed: names of variables, if these are a dict, that the layer is differentiated by, though
        they are not trained: what its gradient leaves at one is no gradient, but something seen in
        backward. The elementwise largest of all layers, microbatches, replicas and devices along
        tp, and no less than 0, is in `Side.maxima` of a step, under the variable's name.
      pair: `(forward, gradient) -> rounds`: how F of such a layer runs beside the gradient of a
        layer of another stage, where a schedule has both in one cell (DualPipe). It is given the
        names of the points (`point`) that either comes to, in order. A round is a name of each, or
        None: both run so far, neither waiting for the other, and the next round waits for both.
        What is left after the last round runs together. It sees no value and can change none, and
        is not asked where either has no point. None: nothing of one waits for the other.

    >>> from jaxpipe.partition.leaf import Leaf
    >>> def layer(params, x, context):
    ...     return LayerOutput(x + x @ params["up"])
    >>> LayerKind(layer, {"up": Leaf(matrix=(0, 1))}).keep
    ()
    """

    layer: Callable[[Tree, "jax.Array", Context], LayerOutput]
    leaves: Tree = None
    state: Callable[["jax.Array", Tree], Tree] | None = None
    keep: tuple[str, ...] = field(default=())
    observed: tuple[str, ...] = field(default=())
    pair: Callable[[Names, Names], Rounds] | None = None


def point(x: "jax.Array", name: str) -> "jax.Array":
    """x itself; F may stop once it is made, and a gradient once that at it is (`LayerKind.pair`).

    A gradient comes to the points of its layer from the last to the first.
    """
    import jax
    from jax.ad_checkpoint import checkpoint_name

    @jax.custom_vjp
    def named(x: jax.Array) -> jax.Array:
        return checkpoint_name(x, IN_FORWARD + name)

    named.defvjp(
        lambda x: (named(x), None), lambda _, dy: (checkpoint_name(dy, IN_GRADIENT + name),)
    )
    return named(x)
