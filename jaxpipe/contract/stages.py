"""A model as pipeline stages see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from jaxpipe.contract.layer import LayerKind, Side

if TYPE_CHECKING:
    import jax

Tree = Any


@dataclass(frozen=True)
class StageFunctions:
    """Three functions and a count; every function is pure.

    `rows` is one microbatch of the batch's tree: its leaves lose the leading axis M and are known
    to every stage, so targets, positions or segment ids need no transfer. The embedding runs before
    the first layer, the head after the last; both may read any leaf of `shared`. Every `x` has the
    same shape and dtype. Where devices along tp share the layers, the functions take one device's
    parts and call collectives over tp.

    Attributes:
      embed: `(shared, rows) -> x`.
      kinds: the kinds of layers by name; one kind may be given as it is.
      head: `(shared, x, rows) -> summed loss`, or an array of several, which are all trained on.
      count: `rows -> how many terms the summed loss has`.
      tokens: `rows -> how many tokens the losses of layers are sums over`; those are divided by
        this number, whatever the head counts. None: as many as `count`.
      outputs: `(shared, x, rows) -> what a step gives back of a microbatch`, of the head's x: a
        tree of arrays of numbers `[B, ...]`, which devices along tp make alike; None: nothing.
      order: the kind of every layer; None: all are of the only kind.
      losses: a name for each of the head's losses.
      leaves: a `Leaf` for every leaf of `shared`; None: nothing is cut.
      reads: names of the batch's leaves; others are refused. None: any.
      variables: the first value of the model's state that is no parameter, a tree of arrays that
        layers find in their context; None: it has none.
      next_variables: `(variables, side) -> variables` after a step; None: they stay.
      report: `side -> what is logged of it`, small arrays by name; None: its sums and maxima.

    Raises `ValueError` where the order names a kind that there is not, or several kinds have none.

    Two layers of one kind and a sum of squares, where a batch is `{"inputs": [M, B, D]}`:

    >>> from jaxpipe.contract import LayerKind, LayerOutput
    >>> model = StageFunctions(
    ...     embed=lambda shared, rows: rows["inputs"] * shared["scale"],
    ...     kinds={"double": LayerKind(lambda params, x, context: LayerOutput(x * params))},
    ...     head=lambda shared, x, rows: (x**2).sum(),
    ...     count=lambda rows: rows["inputs"].shape[0],
    ...     order=("double", "double"),
    ... )
    >>> model.kinds_of(2), model.sliced
    (('double', 'double'), False)
    """

    embed: Callable[[Tree, Tree], "jax.Array"]
    kinds: LayerKind | Mapping[str, LayerKind]
    head: Callable[[Tree, "jax.Array", Tree], "jax.Array"]
    count: Callable[[Tree], "jax.Array"]
    tokens: Callable[[Tree], "jax.Array"] | None = None
    outputs: Callable[[Tree, "jax.Array", Tree], Tree] | None = None
    order: tuple[str, ...] | None = None
    losses: tuple[str, ...] = ("loss",)
    leaves: Tree = None
    reads: tuple[str, ...] | None = None
    variables: Tree = None
    next_variables: Callable[[Tree, Side], Tree] | None = None
    report: Callable[[Side], Mapping[str, "jax.Array"]] | None = None

    def __post_init__(self):
        if self.order is None and len(self.by_name) > 1:
            raise ValueError(
                f"the model has layers of the kinds {', '.join(self.by_name)}: give `order`, the "
                f"kind of every layer."
            )
        for name in self.order or ():
            if name not in self.by_name:
                raise ValueError(
                    f"order names the kind {name!r}, but there are {', '.join(self.by_name)}."
                )

    @property
    def by_name(self) -> Mapping[str, LayerKind]:
        """The kinds by name, also where only one was given."""
        return {"layer": self.kinds} if isinstance(self.kinds, LayerKind) else self.kinds

    @property
    def sliced(self) -> bool:
        """Whether layers take a state from slice to slice."""
        return any(kind.state is not None for kind in self.by_name.values())

    def with_variables(
        self, variables: Mapping[str, Any], after: Callable[[Tree, Side], Tree]
    ) -> Self:
        """The same with more variables by name, of which a step makes what `after` says."""
        before = self.next_variables or (lambda variables, side: variables)

        def next_variables(variables: Tree, side: Side) -> Tree:
            return {**before(variables, side), **after(variables, side)}

        every = {**(self.variables or {}), **variables}
        return replace(self, variables=every, next_variables=next_variables)

    def kinds_of(self, layers: int) -> tuple[str, ...]:
        """The kind of each of so many layers; `ValueError` where the order has another number."""
        order = self.order or (next(iter(self.by_name)),) * layers
        if len(order) != layers:
            raise ValueError(
                f"order names the kinds of {len(order)} layers, but there are {layers}: name all."
            )
        return order
