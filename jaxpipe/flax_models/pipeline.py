"""Flax models in a pipeline: bring modules, and train with Flax's own optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.executor import Pipeline
from jaxpipe.core.mesh import PP, TP, StageLayout
from jaxpipe.core.schedule import Schedule, assign_layers
from jaxpipe.flax_models.layers import by_layer, set_by_layer
from jaxpipe.flax_models.modules import ModuleFunction, check_modules
from jaxpipe.flax_models.partitioned import partition
from jaxpipe.flax_models.stage import PipelineStage, Stage
from jaxpipe.schedules import build, find_family

Tree = Any


class FlaxPipeline(nnx.Module):
    """A Flax model that a schedule executes on a mesh; `from_flax` makes it.

    It is a module whose parameters are stage-stacked and sharded over the mesh, so it trains with
    `nnx.Optimizer` and any optax transformation that treats elements one by one or scales all by
    one global norm. Where a pipeline rank has fewer layers of a kind than another, its parameters
    have zeros in their place, with zero gradients.

    Attributes:
      params: the parameters, `{"embed_head": tree, "layers": (tree, ...)}`; the leaves of a layer
        slot are `[P, ...]`.
    """

    def __init__(self, model: "_Model", pipeline: Pipeline, embed_head: Tree, layers: list[Tree]):
        self._static = _Static(model, pipeline)
        layout, kinds = self._static.layout, {kind.name: kind for kind in model.layers}
        of_runs = [kinds[layout.slot_kinds[run.start]].types for run in layout.runs]
        types = {"embed_head": model.embed_head.types, "layers": tuple(of_runs)}
        params = {"embed_head": embed_head, "layers": layout.stack(layers)}
        shardings = pipeline.sharding.named_shardings(params)
        # Not the arrays of the modules, which a step that donates its state would delete.
        placed = jax.device_put(params, shardings, may_alias=False)
        self.params = nnx.data(jax.tree.map(lambda kind, leaf: kind(leaf), types, placed))

    @property
    def pipeline(self) -> Pipeline:
        """The model as stage functions, the schedule and the mesh."""
        return self._static.pipeline

    def loss_and_gradients(self, batch: Tree) -> tuple[jax.Array, nnx.State]:
        """Run a training step: the mean loss of the batch, and its gradients.

        Args:
          batch: `{"inputs": tree, "targets": tree}` of arrays `[M, B, ...]`.

        Returns:
          The loss, a scalar; and the gradients, as `nnx.Optimizer.update` takes them.

        Raises `ValueError` where the batch does not match the schedule or the mesh, where a layer
        changes the shape of its input, or a module changes its variables.
        """
        _check_keys(batch)
        losses, gradients = self._static.step(self._values(), batch)
        structure = jax.tree.structure(nnx.state(self, nnx.Param))
        return losses.sum(), jax.tree.unflatten(structure, jax.tree.leaves(gradients))

    def loss(self, batch: Tree) -> jax.Array:
        """The mean loss of the batch, by a forward-only pass."""
        _check_keys(batch)
        return self._static.forward(self._values(), batch).sum()

    def stage(self) -> Stage:
        """The whole model as one `Stage`, with the current parameters as full arrays."""
        model, params = self._static.model, self._values()
        layers = self._static.layout.unstack(params["layers"])
        modules = map(ModuleFunction.module, model.layers, layers)
        return Stage(dict(enumerate(modules)), **model.embed_head.module(params["embed_head"]))

    def by_layer(self, state: Any) -> Tree:
        """Gradients by layer; or the state of this pipeline or of its optimizer, to be saved.

        A part that is like the parameters becomes `{"embed": tree, "layers": [tree, ...], "head":
        tree}`, of nested dicts as the modules have them. A parameter that embed and head share is
        in the embedding's. Nothing in the result depends on the schedule or the mesh.
        """
        return by_layer(self._static.layout, state)

    def set_by_layer(self, module: Any, tree: Tree) -> None:
        """Set this pipeline, or its optimizer, to what `by_layer` returned under any schedule.

        Raises `ValueError` where the tree is of another model or optimizer.
        """
        set_by_layer(self._static.layout, module, tree)

    def _values(self) -> Tree:
        is_param = lambda node: isinstance(node, nnx.Param)  # noqa: E731
        return jax.tree.map(lambda param: param[...], self.params, is_leaf=is_param)


def from_flax(
    embed: nnx.Module,
    layers: Sequence[nnx.Module],
    head: nnx.Module,
    loss: Callable[[Any, Any], jax.Array],
    *,
    schedule: Schedule,
    mesh: Mesh,
    layers_per_stage: str | Sequence[int] = "even",
    count: Callable[[Tree], jax.Array] | None = None,
    execution: Execution = Execution(),  # noqa: B008
) -> FlaxPipeline:
    """Return a Flax model as a pipeline, with the modules' parameters placed on the mesh.

    The model is `head(layers[-1](... layers[0](embed(inputs))))`. Modules are left as they are;
    linen modules are wrapped by `nnx.bridge.ToNNX`. Layers that differ only in the values of their
    parameters are of one kind. `embed` and `head` may share parameters.

    On a mesh with tp > 1, parameters whose metadata names the mesh axis `tp` are sharded over it,
    and so is the compute that follows from them (`partitioned.py`); no module calls a collective.

    Args:
      embed: `inputs -> x`.
      layers: `x -> y` each, of x's shape and dtype.
      head: `x -> outputs`.
      loss: `(outputs, targets) -> array` of terms, whose mean over the batch is minimised.
      schedule: the schedule, of the mesh's pp.
      mesh: a mesh of `make_mesh`.
      layers_per_stage: a policy of `assign_layers`, or the counts.
      count: `targets -> number of terms` over which the mean is taken, where `loss` returns zeros
        at others; None: all terms.
      execution: execution options.

    Raises:
      ValueError: a module is not an initialised `nnx.Module` or has random state; layers share a
        variable; there are fewer layers than stages; nothing is sharded over a tp above 1.

    A regression through four layers on two pipeline ranks:

    >>> import optax
    >>> from jaxpipe.core.mesh import make_mesh
    >>> from jaxpipe.schedules import build
    >>> rngs = nnx.Rngs(0)
    >>> layers = [nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), jnp.tanh) for _ in range(4)]
    >>> pipeline = from_flax(
    ...     nnx.Linear(2, 4, rngs=rngs), layers, nnx.Linear(4, 1, rngs=rngs), optax.l2_loss,
    ...     schedule=build("zb_h1", pp=2, microbatches=4),
    ...     mesh=make_mesh(pp=2, devices=jax.devices()[:2]),
    ... )
    >>> optimizer = nnx.Optimizer(pipeline, optax.adam(0.01), wrt=nnx.Param)
    >>> batch = {"inputs": jnp.ones((4, 8, 2)), "targets": jnp.full((4, 8, 1), 3.0)}
    >>> losses = []
    >>> for _ in range(3):
    ...     value, gradients = pipeline.loss_and_gradients(batch)
    ...     _ = optimizer.update(pipeline, gradients)
    ...     losses.append(float(value))
    >>> losses[0] > losses[1] > losses[2]
    True
    """
    if isinstance(layers, nnx.Module) and not isinstance(layers, nnx.List):
        raise ValueError(f"layers is a {type(layers).__name__}: give a list of modules.")
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"schedule is {schedule!r}: give schedule.build(NAME, pp=P, microbatches=M)."
        )
    layers, tp = list(layers), mesh.shape[TP]
    if not layers:
        raise ValueError("the list of layers is empty: a pipeline needs a layer for every stage.")
    named = {f"layers[{i}] ({type(one).__name__})": one for i, one in enumerate(layers)}
    check_modules({"embed": embed, "head": head} | named)
    both = {"embed": embed, "head": head}
    embed_head_function, embed_head = ModuleFunction.split("embed_head", both, tp, (PP,))
    functions, params = zip(*(ModuleFunction.split(name, one, tp) for name, one in named.items()))
    model = _Model(embed_head_function, functions, loss, count, tp)
    counts = assign_layers(len(layers), schedule.stages, layers_per_stage)
    pipeline = Pipeline(model.functions, schedule, mesh, counts, execution)
    return FlaxPipeline(model, pipeline, embed_head, list(params))


def build_pipeline_schedule(
    stages: Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[[Any, Any], jax.Array],
    schedule: str = "1f1b",
    *,
    mesh: Mesh,
    **options: Any,
) -> FlaxPipeline:
    """Return all stages of a model as a pipeline of a schedule family.

    One program runs all stages, so it takes all of them where a runtime with a process for every
    stage takes its own.

    Args:
      stages: the stages in order; several for every pipeline rank where the family has virtual
        stages.
      n_microbatches: microbatches per step.
      loss_fn: as the loss of `from_flax`.
      schedule: name of the family.
      mesh: a mesh of `make_mesh`.
      **options: further arguments of `from_flax`.

    Raises `ValueError` also where stages do not follow one another, or are not as many as the
    schedule has.
    """
    for earlier, later in pairwise(stages):
        if earlier.y != later.x:
            raise ValueError(
                f"a stage returns {earlier.y}, but the next takes {later.x}: list the stages in "
                f"order, built with one microbatch size."
            )
    modules = [stage.module for stage in stages]
    embed, head = modules[0].embed, modules[-1].head
    held = [(stage.embed is not None, stage.head is not None) for stage in modules]
    layers = [(int(i), layer) for stage in modules for i, layer in stage.layers.items()]
    want = [(i == 0, i == len(stages) - 1) for i in range(len(stages))]
    numbers = [i for i, _ in layers]
    if held != want or embed is None or head is None or numbers != list(range(len(layers))):
        raise ValueError(
            f"the stages have the layers {numbers} and (embedding, head) {held}: "
            f"list all stages in order, of which the first has the embedding and the last the head."
        )
    pp = mesh.shape[PP]
    virtual = len(stages) // pp if find_family(schedule).has_option("virtual_stages") else None
    return from_flax(
        embed,
        [layer for _, layer in layers],
        head,
        loss_fn,
        schedule=build(schedule, pp=pp, microbatches=n_microbatches, virtual_stages=virtual),
        mesh=mesh,
        layers_per_stage=[len(stage.layers) for stage in modules],
        **options,
    )


@dataclass(frozen=True, eq=False)
class _Model:
    """The modules of a model as functions, without the values that their parameters have later."""

    embed_head: ModuleFunction
    layers: tuple[ModuleFunction, ...]
    loss: Callable[[Any, Any], jax.Array]
    count_targets: Callable[[Tree], jax.Array] | None
    tp: int

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as the pipeline runs it."""
        kinds: list[ModuleFunction] = []
        for layer in self.layers:
            if not any(map(layer.equals, kinds)):
                kinds.append(layer)
        order = [next(kind for kind in kinds if kind.equals(layer)) for layer in self.layers]
        specs = self.embed_head.specs
        every = jax.tree.leaves([specs, *(kind.specs for kind in kinds)])
        if self.tp > 1 and not any(spec.sharded for spec in every):
            raise ValueError(
                f"the mesh has tp={self.tp}, but no parameter's metadata names the axis 'tp' "
                f"(nnx.with_partitioning): name it, or use a mesh with tp=1."
            )
        embed, head = (partition(one, specs, self.tp) for one in (self._embed, self._head))
        return StageFunctions(
            embed=lambda params, rows: embed(params, (), rows["inputs"]),
            kinds={kind.name: self._layer_kind(kind) for kind in kinds},
            head=lambda params, x, rows: head(params, x, rows["targets"]),
            count=self._count,
            order=tuple(kind.name for kind in order),
            embed_head_specs=specs,
        )

    def _embed(self, params: Tree, _: Tree, inputs: Tree) -> jax.Array:
        x = self.embed_head(params, inputs, part=lambda modules: modules["embed"])
        return _one_array(x, "embed returns", "one array x")

    def _terms(self, params: Tree, x: jax.Array, targets: Tree) -> jax.Array:
        outputs = self.embed_head(params, x, part=lambda modules: modules["head"])
        return _one_array(self.loss(outputs, targets), "loss returns", "one array of terms")

    def _head(self, params: Tree, x: jax.Array, targets: Tree) -> jax.Array:
        terms = self._terms(params, x, targets)
        return terms.sum(dtype=jnp.promote_types(terms.dtype, jnp.float32))

    def _count(self, rows: Tree) -> jax.Array:
        if self.count_targets is not None:
            count = _one_array(self.count_targets(rows["targets"]), "count returns", "a number")
            if count.shape:
                raise ValueError(
                    f"count returns an array of shape {count.shape}, but must return a number."
                )
            return count
        params = self.embed_head.shapes
        x = jax.eval_shape(self._embed, params, (), rows["inputs"])
        return jnp.asarray(math.prod(jax.eval_shape(self._terms, params, x, rows["targets"]).shape))

    def _layer_kind(self, layer: ModuleFunction) -> LayerKind:
        def one(params: Tree, x: jax.Array, _: Tree) -> jax.Array:
            return _one_array(layer(params, x), f"{layer.name} returns", "one array")

        apply = partition(one, layer.specs, self.tp)
        return LayerKind(lambda params, x, context: LayerOutput(apply(params, x, ())), layer.specs)


@dataclass(frozen=True, eq=False)
class _Static:
    """What a `FlaxPipeline` has besides arrays; it is compared by identity, as `nnx.jit` needs."""

    model: _Model
    pipeline: Pipeline

    @cached_property
    def layout(self) -> StageLayout:
        return self.pipeline.layout(0)

    @cached_property
    def step(self) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
        return jax.jit(self.pipeline.losses_and_gradients)

    @cached_property
    def forward(self) -> Callable[[Tree, Tree], jax.Array]:
        return jax.jit(self.pipeline.losses)


def _check_keys(batch: Tree) -> None:
    kind = type(batch).__name__
    if not isinstance(batch, dict) or batch.keys() != {"inputs", "targets"}:
        has = f"has {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"is a {kind}"
        raise ValueError(f"the batch {has}, but must be a dict of inputs and targets.")


def _one_array(value: Any, what: str, wanted: str) -> jax.Array:
    """The value as an array; raises `ValueError` where it is a tree of several."""
    if not jax.tree_util.all_leaves([value]) or value is None:
        raise ValueError(f"{what} a {type(value).__name__}, but must return {wanted}.")
    return jnp.asarray(value)
