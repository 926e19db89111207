"""The pipelined step of a model, a schedule and a mesh: it wraps the `shard_map`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.core.contract import Aux, StageFunctions, Tree
from jaxpipe.core.executor.execution import Execution
from jaxpipe.core.executor.fit import check_fit
from jaxpipe.core.executor.program import DeviceProgram
from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.core.mesh import PP, Sharding, StageLayout, batch_spec
from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.core.schedule import Schedule, Tables, forward_only, lower
from jaxpipe.core.split.halves import in_halves


@dataclass(frozen=True)
class Pipeline:
    """A model, a schedule and a mesh; its methods run a step.

    The methods take stage-stacked params (`jaxpipe.core.mesh.StageLayout.stack`), a batch
    `[M, B, ...]` with B sharded over data-parallel replicas, and the model's variables, if any.
    They raise `ValueError` where these do not match the schedule or mesh. Call them in `jax.jit`.

    Attributes:
      functions: the model: embedding, layers and head.
      schedule: the ordered actions of every pipeline rank.
      mesh: a mesh of `make_mesh`; its pp must be the schedule's.
      layers_per_stage: number of layers of every stage; None: every layer slot holds a layer, and
        no loop runs over layers.
      execution: execution options.

    >>> import jax.numpy as jnp
    >>> from jaxpipe.core.contract import LayerKind, LayerOutput
    >>> from jaxpipe.core.mesh import make_mesh
    >>> from jaxpipe.core.schedule import zb_h1
    >>> model = StageFunctions(
    ...     embed=lambda shared, rows: rows["inputs"] * shared["scale"],
    ...     kinds=LayerKind(lambda params, x, context: LayerOutput(x * params["gain"])),
    ...     head=lambda shared, x, rows: (x**2).sum(),
    ...     count=lambda rows: jnp.size(rows["inputs"]),
    ... )
    >>> mesh = make_mesh(pp=2, devices=jax.devices()[:2])
    >>> pipeline = Pipeline(model, zb_h1(pp=2, microbatches=4), mesh, (1, 1))
    >>> layers = [{"gain": jnp.float32(2)}, {"gain": jnp.float32(3)}]
    >>> slots = pipeline.layout(1).stack(layers)
    >>> params = {"embed_head": {"scale": jnp.float32(1)}, "layers": slots}
    >>> got = jax.jit(pipeline.step)(params, {"inputs": jnp.ones((4, 2, 4))})
    >>> got.losses.tolist(), got.gradients["layers"][0]["gain"].tolist()
    ([9.0, 9.0, 9.0, 9.0], [36.0, 24.0])
    """

    functions: StageFunctions
    schedule: Schedule
    mesh: Mesh
    layers_per_stage: Sequence[int] | None = None
    execution: Execution = field(default_factory=Execution)

    @cached_property
    def sharding(self) -> Sharding:
        """How parameters and returned gradients are sharded on the mesh."""
        functions = self.functions
        kinds = functions.kinds_by_name

        def of_run(run: int) -> Tree:
            name = next(iter(kinds))
            if len(kinds) > 1:
                layout = self.layout(0)
                name = layout.slot_kinds[layout.runs[run].start]
            return kinds[name].param_specs

        loops = self.execution.unroll_layers is not None
        return Sharding(
            self.mesh, functions.embed_head_specs, of_run, self.execution.zero_stage,
            layers=tuple(map(len, self.layout(0).runs)) if loops else (),
        )  # fmt: skip

    @cached_property
    def traced_functions(self) -> StageFunctions:
        """The model as devices run it, which may be in halves."""
        halves = self.execution.overlap_halves
        return in_halves(self.functions, halves) if halves else self.functions

    def layout(self, slots: int) -> StageLayout:
        """Return the layout of layers over stages.

        `slots` is the number of layer slots of a pipeline rank; it gives the number of layers
        where neither `layers_per_stage` nor the model's `order` does.
        """
        placement, order = self.schedule.placement, self.functions.order
        counts = self.layers_per_stage
        if counts is None:
            of_stage = len(order) // placement.stages if order else slots // placement.stored_chunks
            counts = (of_stage,) * placement.stages
        kinds = self.functions.layer_kinds(sum(counts))
        execution = self.execution
        return StageLayout(
            tuple(counts), placement, kinds, execution.unroll_layers, execution.remat_layers
        )

    @cached_property
    def tables(self) -> Tables:
        """The schedule lowered to the tables that the scan reads."""
        return lower(self.schedule, self.execution.lockstep)

    @cached_property
    def forward_tables(self) -> Tables:
        """Tables of a forward-only pass; it stores no activations that `in_flight` could limit."""
        schedule = self.schedule
        forward = forward_only(schedule.placement, schedule.microbatches, schedule.slices)
        plain = replace(self.execution.lockstep, in_flight=None, every=1, offset=0, phases=1)
        return lower(forward, plain)

    def step(
        self,
        params: Tree,
        batch: Tree,
        variables: Tree = None,
        loss_scale: jax.Array | None = None,
    ) -> StepOutput:
        """Run a training step: losses, gradients of their sum, and auxiliary outputs.

        The head's losses and every auxiliary loss of a layer are summed over the batch and divided
        by the number of their own terms; they are 0 where that number is 0.

        Args:
          params: stage-stacked params.
          batch: a tree of arrays `[M, B, ...]`.
          variables: the model's variables.
          loss_scale: scalar that multiplies the losses in backward and divides the gradients at the
            end; None: see `Execution`.

        Returns:
          A `StepOutput`; its gradients have the structure, dtypes and shardings of `params`, with
          None for frozen parameters.
        """
        return self._run(self.tables, params, batch, variables, loss_scale)

    def losses_and_gradients(
        self, params: Tree, batch: Tree, variables: Tree = None
    ) -> tuple[jax.Array, Tree]:
        """Return each microbatch's share of the loss, `[M]` or `[M, K]`, and their gradients."""
        return self.step(params, batch, variables)[:2]

    def losses(self, params: Tree, batch: Tree, variables: Tree = None) -> jax.Array:
        """Return each microbatch's share of the loss, `[M]` or `[M, K]`, of a forward-only pass."""
        return self.forward(params, batch, variables).losses

    def forward(self, params: Tree, batch: Tree, variables: Tree = None) -> StepOutput:
        """Run a forward-only pass; it returns what `step` returns, without gradients."""
        return self._run(self.forward_tables, params, batch, variables)

    def _run(
        self, tables: Tables, params: Tree, batch: Tree, variables: Tree, loss_scale: Any = None
    ) -> StepOutput:
        check_fit(self, params, batch)
        unsharded = variables, loss_scale
        return self._program(tables, params)(params, batch, unsharded, tables.columns)

    def _program(self, tables: Tables, params: Tree) -> Callable[..., StepOutput]:
        """Return the step on the mesh, of `(params, batch, (variables, loss_scale), columns)`."""
        specs = self.sharding.partition_specs(params)
        # Typed as trees, because they stand for arrays in a `StepOutput`.
        all_have: Tree = PartitionSpec()
        rows: Tree = batch_spec()
        of_devices: Tree = PartitionSpec(*self.mesh.axis_names)
        of_gradients = select(is_trained(self.sharding.param_shardings(params)), specs)
        return jax.shard_map(
            self.device_program(tables, params),
            mesh=self.mesh,
            in_specs=(specs, rows, all_have, PartitionSpec(None, PP)),
            out_specs=StepOutput(
                all_have,
                of_gradients if tables.has_gradients else None,
                Aux({}, all_have, all_have, rows),
                rows,
                all_have,
                all_have,
                of_devices if self.execution.fingerprints else None,
            ),
            check_vma=False,  # not differentiated; psums in layers have their own VJPs
        )

    def device_program(
        self, tables: Tables, params: Tree, program: Callable[..., DeviceProgram] = DeviceProgram
    ) -> DeviceProgram:
        """Return what a device runs; `program` takes the fields of `DeviceProgram` in order."""
        shardings = self.sharding.param_shardings(params)
        layout = self.layout(len(params["layers"]))
        return program(self.traced_functions, tables, self.execution, layout, shardings)


def loss_and_gradients(
    functions: StageFunctions,
    params: Tree,
    batch: Tree,
    schedule: Schedule,
    mesh: Mesh,
    **options: Any,
) -> tuple[jax.Array, Tree]:
    """Return loss and gradients of one pipelined step.

    Args:
      functions: the model.
      params: stage-stacked params.
      batch: a tree of arrays `[M, B, ...]`.
      schedule: the schedule.
      mesh: a mesh of `make_mesh`.
      **options: further fields of `Pipeline`.

    Returns:
      The loss, a scalar: the head's loss and every auxiliary loss of a layer, each as a mean over
      its own terms in the batch; and its gradients, with the structure, dtypes and
      shardings of `params`; None for frozen parameters.

    Raises `ValueError` where model, parameters, batch, schedule and mesh do not match.

    A regression through four layers on two pipeline ranks:

    >>> import jax, jax.numpy as jnp
    >>> from jaxpipe.core.schedule import one_f_one_b
    >>> from jaxpipe.core.mesh import StageLayout, make_mesh
    >>> from jaxpipe.core.contract import LayerKind, LayerOutput
    >>> toy = StageFunctions(
    ...     embed=lambda shared, mb: mb["inputs"] @ shared["enter"],
    ...     kinds=LayerKind(lambda w, x, context: LayerOutput(x + jnp.tanh(x @ w))),
    ...     head=lambda shared, x, mb: jnp.sum((x @ shared["leave"] - mb["targets"]) ** 2),
    ...     count=lambda mb: jnp.size(mb["targets"]),
    ... )
    >>> layout = StageLayout((2, 2))
    >>> params = {
    ...     "embed_head": {"enter": jnp.eye(4), "leave": jnp.ones((4, 1))},
    ...     "layers": layout.stack([0.1 * jnp.eye(4)] * 4),
    ... }
    >>> batch = {"inputs": jnp.ones((8, 2, 4)), "targets": jnp.ones((8, 2, 1))}
    >>> mesh = make_mesh(pp=2, devices=jax.devices()[:2])
    >>> schedule = one_f_one_b(pp=2, microbatches=8)
    >>> loss, gradients = loss_and_gradients(toy, params, batch, schedule, mesh)
    >>> print(f"{loss:.3f}", gradients["layers"][0].shape)
    23.492 (2, 4, 4)
    """
    pipeline = Pipeline(functions, schedule, mesh, **options)
    output = pipeline.step(params, batch)
    added = 0 if output.aux_losses is None else output.aux_losses.sum()
    return output.losses.sum() + added, output.gradients
