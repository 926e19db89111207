"""A model as the pipeline sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from jaxpipe.core.contract.layer import Aux, LayerKind, Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class StageFunctions:
    """A model: embedding, layers in order, head and token counts; every function is pure.

    `embed_head` is the tree of the parameters that belong to no layer; the embedding and the head
    may both read any of them. `rows` is the data of one microbatch: the leaves of the batch without
    their leading axis M. Every stage has it, so targets, positions or segment ids need no transfer.
    Every `x` has the same shape and dtype. Under tensor parallelism the functions receive one
    device's shards and call collectives over tp.

    Attributes:
      embed: `(embed_head, rows) -> x`, before the first layer.
      kinds: the layer kinds by name, or the only kind.
      head: `(embed_head, x, rows) -> summed loss`, after the last layer; an array of several losses
        is trained on their sum.
      count: `rows -> number of terms in the summed loss`.
      outputs: `(embed_head, x, rows) -> tree` of numeric arrays `[B, ...]` that a step returns for
        every microbatch, computed from the head's x and equal on devices along tp; None: nothing.
      order: the kind of every layer; None: all layers are of the only kind.
      losses: a name for each of the head's losses.
      embed_head_specs: a `ParamSpec` for every parameter of `embed_head`; None: none is sharded.
      batch_keys: names of the batch's leaves; others are refused. None: any.
      variables: initial value of the model's state that is no parameter, a tree of arrays that
        layers find in their context; None: there is none.
      next_variables: `(variables, aux) -> variables` after a step; None: variables do not change.
      report: `aux -> values to log`, small arrays by name; None: its sums and maxima.

    Raises:
      ValueError: `order` names an unknown kind, or is missing though there are several kinds; or
        every parameter is declared frozen.

    Two layers of one kind and a sum of squares, where a batch is `{"inputs": [M, B, D]}`:

    >>> from jaxpipe.core.contract import LayerKind, LayerOutput
    >>> model = StageFunctions(
    ...     embed=lambda embed_head, rows: rows["inputs"] * embed_head["scale"],
    ...     kinds={"double": LayerKind(lambda params, x, context: LayerOutput(x * params))},
    ...     head=lambda embed_head, x, rows: (x**2).sum(),
    ...     count=lambda rows: rows["inputs"].shape[0],
    ...     order=("double", "double"),
    ... )
    >>> model.layer_kinds(2), model.has_slices
    (('double', 'double'), False)
    """

    embed: Callable[[Tree, Tree], "jax.Array"]
    kinds: LayerKind | Mapping[str, LayerKind]
    head: Callable[[Tree, "jax.Array", Tree], "jax.Array"]
    count: Callable[[Tree], "jax.Array"]
    outputs: Callable[[Tree, "jax.Array", Tree], Tree] | None = None
    order: tuple[str, ...] | None = None
    losses: tuple[str, ...] = ("loss",)
    embed_head_specs: Tree = None
    batch_keys: tuple[str, ...] | None = None
    variables: Tree = None
    next_variables: Callable[[Tree, Aux], Tree] | None = None
    report: Callable[[Aux], Mapping[str, "jax.Array"]] | None = None

    def __post_init__(self):
        if self.order is None and len(self.kinds_by_name) > 1:
            raise ValueError(
                f"the model has layers of the kinds {', '.join(self.kinds_by_name)}: give `order`, "
                f"the kind of every layer."
            )
        for name in self.order or ():
            if name not in self.kinds_by_name:
                raise ValueError(
                    f"order names the kind {name!r}, but there are {', '.join(self.kinds_by_name)}."
                )
        self._check_trained()

    def _check_trained(self) -> None:
        """Raise `ValueError` where every parameter is declared frozen."""
        import jax

        kinds = self.kinds_by_name.values()
        specs = [self.embed_head_specs, *(kind.param_specs for kind in kinds)]
        leaves = jax.tree.leaves(specs)
        if leaves and None not in specs and not any(spec.trained for spec in leaves):
            raise ValueError(
                f"all {len(leaves)} parameters of the model have trained=False: a step would "
                f"compute no gradient; declare one of them with ParamSpec(trained=True)."
            )

    @property
    def kinds_by_name(self) -> Mapping[str, LayerKind]:
        """The layer kinds by name; a kind that was passed alone is named "layer"."""
        return {"layer": self.kinds} if isinstance(self.kinds, LayerKind) else self.kinds

    @property
    def has_slices(self) -> bool:
        """Whether layers pass a state from one sequence slice to the next."""
        return any(kind.state is not None for kind in self.kinds_by_name.values())

    def with_variables(
        self, variables: Mapping[str, Any], after: Callable[[Tree, Aux], Tree]
    ) -> Self:
        """A copy with more variables by name, which `after` updates once a step."""
        before = self.next_variables or (lambda variables, aux: variables)

        def next_variables(variables: Tree, aux: Aux) -> Tree:
            return {**before(variables, aux), **after(variables, aux)}

        every = {**(self.variables or {}), **variables}
        return replace(self, variables=every, next_variables=next_variables)

    def layer_kinds(self, layers: int) -> tuple[str, ...]:
        """The kind of each of `layers` layers.

        Raises:
          ValueError: `order` has another length.
        """
        order = self.order or (next(iter(self.kinds_by_name)),) * layers
        if len(order) != layers:
            raise ValueError(
                f"order names the kinds of {len(order)} layers, but there are {layers}: name all."
            )
        return order
