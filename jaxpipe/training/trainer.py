"""The objects of a run, built from its plan: mesh, model, state and compiled steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe import optimizer as optimizers
from jaxpipe.config import Config
from jaxpipe.core.contract import Aux
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.core.mesh import ReplicaFactors, Sharding, StageLayout, make_mesh, map_stage_stacked
from jaxpipe.core.mesh.flags import choose
from jaxpipe.core.schedule import Schedule
from jaxpipe.model.family import Model
from jaxpipe.model.layers.moe.products import GroupedProduct
from jaxpipe.planning import Devices, RunPlan, resolve
from jaxpipe.planning.model import grouped_of, model_of
from jaxpipe.runtime.programs import compiler
from jaxpipe.runtime.programs.program_store import ProgramStore
from jaxpipe.training import offloaded_moments as moments
from jaxpipe.training.batch_sharder import BatchSharder
from jaxpipe.training.execution import execution_of
from jaxpipe.training.initial import full_parameters, sharded_parameters
from jaxpipe.training.state import State
from jaxpipe.training.state_checks import CheckedProgram, check_batch_shards, check_state
from jaxpipe.training.step_guard import StepGuard
from jaxpipe.training.step_metrics import Rates, losses_of, step_metrics

Tree = Any


@dataclass(frozen=True)
class Trainer:
    """The parts of a run that do not read or write files.

    Attributes:
      plan: of the run: its concrete configuration, schedule and stages.
      devices: the devices of the mesh, in order; None: all devices.
      program_inputs: what the trainer's programs depend on (`agreement.inputs_of_programs`), by
        which they are kept in the compile cache; "": they are traced anew.
    """

    plan: RunPlan
    devices: Sequence[jax.Device] | None = None
    program_inputs: str = ""

    @classmethod
    def resolve(
        cls, config: Config, devices: Sequence[jax.Device] | None = None, **more: Any
    ) -> Self:
        """The trainer of a configuration, resolved for these devices; None: all devices.

        `more` are fields of a subclass. Raises `ConfigError` as `planning.resolve` does.
        """
        return cls(resolve(config, Devices.present(devices or jax.devices())), devices, **more)

    @property
    def config(self) -> Config:
        """The run's configuration, with concrete settings."""
        return self.plan.config

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh (pp, rp, dp, ep, tp)."""
        parallel = self.config.parallel
        factors = ReplicaFactors(rp=parallel.dp_replicate, ep=parallel.ep_replicas)
        return make_mesh(
            parallel.pp, parallel.dp, parallel.tp, self.devices,
            pipeline_first=parallel.pipeline_first, factors=factors,
        )  # fmt: skip

    @cached_property
    def programs(self) -> ProgramStore:
        """The trainer's compiled programs on disk."""
        return ProgramStore(self.program_inputs, list(self.mesh.devices.flat))

    @cached_property
    def layout(self) -> StageLayout:
        """The layers of each stage, and the pipeline rank of each stage."""
        kinds = self.model.functions.layer_kinds(self.config.model.pipeline_layers)
        unroll = self.plan.unroll_layers
        remat_layers = self.config.train.remat_layers
        return StageLayout(self.plan.layers, self.schedule.placement, kinds, unroll, remat_layers)

    @property
    def schedule(self) -> Schedule:
        """The order of actions on every pipeline rank."""
        return self.plan.schedule

    @cached_property
    def execution(self) -> Execution:
        """How the schedule is executed on this kind of device."""
        return execution_of(self.plan)

    @cached_property
    def model(self) -> Model:
        """The model's functions, for this mesh."""
        return model_of(self.config, self.grouped)

    @cached_property
    def grouped(self) -> GroupedProduct:
        """The grouped matrix product of experts on this kind of device."""
        return grouped_of(self.config, self.mesh.devices.flat[0])

    @cached_property
    def pipeline(self) -> Pipeline:
        """The model on the mesh, executed by the schedule."""
        functions, counts = self.model.functions, self.layout.layers_per_stage
        return Pipeline(functions, self.schedule, self.mesh, counts, self.execution)

    @property
    def sharding(self) -> Sharding:
        """How stage-stacked trees are stored on the mesh."""
        return self.pipeline.sharding

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer with its learning rate, without clipping."""
        return optimizers.build(
            self.config.optimizer, self.config.train.steps, self.sharding.param_shardings
        )

    @cached_property
    def state_shapes(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        return jax.tree.map(
            lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how),
            self._unplaced_shapes, self.state_shardings,
        )  # fmt: skip

    @cached_property
    def _unplaced_shapes(self) -> State:
        return jax.eval_shape(self._init)

    @cached_property
    def state_shardings(self) -> State:
        """Shardings of the state: moments like parameters, all other arrays replicated."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        every = map_stage_stacked(
            self.sharding.named_shardings, self._unplaced_shapes, lambda leaf: replicated
        )
        if self.config.train.offload_moments:
            every = every._replace(optimizer=moments.kept_on_host(every.optimizer))
        return every

    def init(self) -> State:
        """A new state, initialised on its devices; the same numbers on every mesh."""
        return self.fresh(self.init_parameters())

    def init_parameters(self) -> Tree:
        """The initial parameters, in stage-stacked form."""
        return sharded_parameters(
            self.model, self.layout, self.config.train.seed, self.sharding,
            self.state_shapes.params, self.programs,
        )  # fmt: skip

    def fresh(self, params: Tree) -> State:
        """The state of step 0 with these stage-stacked parameters, which are donated."""
        init = jax.jit(self.unplaced, out_shardings=self.state_shardings, donate_argnums=0)
        stored = self.programs.compiled("init-state", init, params, results=self.state_shapes)
        return stored(params)

    def state_of(
        self, parts: dict[str, Tree], guarded: Mapping[str, Any] = MappingProxyType({})
    ) -> State:
        """The state from a checkpoint's entries (`State.parts`) and the guard's saved numbers.

        Variables that the checkpoint lacks are new. Moments go to the memory of `state_shardings`.
        """
        guard = StepGuard.fresh(self.config.train).restored(guarded)
        return State.of_parts(parts, guard, self.model.functions.variables, self.state_shardings)

    def unplaced(self, params: Tree) -> State:
        """The state of step 0 without shardings; pure, for use within compiled functions."""
        variables = jax.tree.map(jnp.asarray, self.model.functions.variables)
        guard, optimizer = StepGuard.fresh(self.config.train), self.optimizer.init(params)
        if self.config.train.offload_moments:
            optimizer = moments.returned(optimizer)
        return State(params, optimizer, jnp.int32(0), variables, guard)

    @cached_property
    def train_step(self) -> Any:
        """Compiled `(state, batch) -> (state, metrics)`; the state is donated.

        A step whose loss or gradient norm is not finite, or a spike, makes no update. It is
        skipped, or it stops the run (`StepGuard`): then later steps leave the state unchanged, so a
        loop that reads metrics one step late still has the state before the failure. A step without
        targets has the loss NaN and makes no update either. Metrics are grad_norm, skipped_steps,
        not_finite_in_row, spikes_in_row (`train.spike_sigma`), loss_scale (float16), the losses
        (`losses_of`), and the layers' auxiliary outputs by name.
        """
        return self.compiled(self.step)

    def compiled(self, step: Any) -> Any:
        """Compile a function with the signature of `step`; the state is donated."""
        program = jax.jit(
            step,
            in_shardings=(self.state_shardings, self.sharder.sharding),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )
        return CheckedProgram(program, self._check_arguments)

    def check_state(self, state: State) -> None:
        """Raise `ConfigError` where a state, which may be traced, is not of this trainer."""
        check_state(state, self.state_shapes)

    def _check_arguments(self, state: State, batch: Tree) -> None:
        self.check_state(state)
        check_batch_shards(batch, self.sharder.sharding)

    def step(self, state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        """The function of `train_step`, for use within compiled functions."""
        return self.step_with_outputs(state, batch)[:2]

    def step_with_outputs(
        self, state: State, batch: Tree
    ) -> tuple[State, dict[str, jax.Array], StepOutput]:
        """What `step` returns, and the outputs of the pipeline, with the unclipped gradients."""
        self.check_state(state)
        self.sharder.check_placed(batch, trains=True)
        outputs = self.pipeline.step(state.params, batch, state.variables, state.guard.loss_scale)
        return *self.after(state, outputs), outputs

    def after(self, state: State, outputs: StepOutput) -> tuple[State, dict[str, jax.Array]]:
        """The state after a step with these outputs of the pipeline, and the step's metrics."""
        assert outputs.counts is not None  # as the head counts terms
        has_targets = (outputs.counts > 0).any()
        loss = self.first_loss(outputs.losses)
        state, metrics = self.update(state, loss, outputs.gradients, outputs.aux, has_targets)
        losses = self.losses_of(outputs.losses, outputs.counts, outputs.aux_losses)
        return state, metrics | losses

    def first_loss(self, shares: jax.Array) -> jax.Array:
        """The first of the head's K losses from shares `[M]` or `[M, K]`; 0 without targets."""
        return (shares if shares.ndim == 1 else shares[:, 0]).sum()

    @property
    def losses_of(self) -> Callable[..., dict[str, jax.Array]]:
        """`rates.losses_of` with this model's loss names and this schedule's slices."""
        return partial(losses_of, self.model.functions.losses, slices=self.schedule.slices)

    def update(
        self, state: State, loss: jax.Array, gradients: Tree, aux: Aux,
        has_targets: jax.Array | bool = True,
    ) -> tuple[State, dict[str, jax.Array]]:  # fmt: skip
        """The state after an update, and the metrics; pure, for use within compiled functions.

        There is no update where the guard does not accept the step (`StepGuard.after`).
        Raises `ValueError` where an auxiliary output has the name of another metric.
        """
        norm, train = optimizers.global_norm(gradients), self.config.train
        metrics = step_metrics(loss, norm, aux, self.model.functions.report)
        guard, updates = state.guard.after(loss, norm, train, has_targets)
        step = state.step + ~guard.stops(train)
        metrics |= guard.metrics()
        if state.guard.loss_scale is not None:  # that of this step
            metrics["loss_scale"] = state.guard.loss_scale
        if self.config.debug.skip_update:
            return state._replace(step=step, guard=guard), metrics
        gradients = optimizers.clip_by_global_norm(gradients, norm, self.config.optimizer.clip_norm)
        apply = partial(optimizers.apply, self.optimizer)
        if train.offload_moments:
            apply = partial(moments.update_in_turn, apply)
        params, after = apply(gradients, state.optimizer, state.params, updates)
        variables, following = state.variables, self.model.functions.next_variables
        if following is not None:
            variables = choose(updates, following(variables, aux), variables)
        return State(params, after, step, variables, guard), metrics

    def averaged(self, state: State) -> Tree:
        """The parameters to evaluate: those of the state, or their average if it has one."""
        optimizer = state.optimizer
        if self.config.train.offload_moments:
            optimizer, _ = moments.fetched(optimizer, state.step)
        return optimizers.averaged(optimizer, state.params)

    @cached_property
    def evaluation(self) -> Self:
        """The trainer of the same run, with the same state, whose experts drop no token."""
        config = self.config.for_evaluation()
        if config == self.config:
            return self
        return replace(self, plan=replace(self.plan, config=config))

    @cached_property
    def eval_step(self) -> Any:
        """Compiled `(state, batch) -> (loss, targets)`, which runs the forward-only pass.

        Experts drop no token, except for a loss that compares with scores in the batch
        (`Config.loss_rows`): these are of a step that drops some. `loss` is the mean over the
        batch's targets, 0 if there are none; `targets` is the number of targets of each microbatch,
        `[M]`.
        """
        evaluated = self if self.config.loss_rows else self.evaluation

        def loss(state: State, batch: Tree) -> tuple[jax.Array, jax.Array]:
            self.check_state(state)
            self.sharder.check_placed(batch, trains=False)
            outputs = evaluated.pipeline.forward(self.averaged(state), batch, state.variables)
            assert outputs.counts is not None
            return self.first_loss(outputs.losses), outputs.counts

        program = jax.jit(
            loss,
            in_shardings=(self.state_shardings, self.sharder.sharding),
            compiler_options=self.compiler_options,
        )
        return CheckedProgram(program, self._check_arguments)

    @cached_property
    def sharder(self) -> BatchSharder:
        """Shards host batches over the mesh."""
        return BatchSharder(self.config, self.mesh, self.model.functions.batch_keys)

    def put(self, batch: dict[str, Any], position: int | None = None) -> dict[str, jax.Array]:
        """Put a host batch on the devices by `BatchSharder.put`."""
        return self.sharder.put(batch, position)

    @property
    def samples_per_step(self) -> int:
        """Sequences per step, over all devices."""
        return math.prod(self.config.batch_shape.values())

    @cached_property
    def rates(self) -> Rates:
        """Computes the metrics of a step that the host adds."""
        return Rates(self.config, self.mesh)

    @cached_property
    def compiler_options(self) -> dict[str, Any]:
        """XLA options of the compiled steps."""
        platform = self.mesh.devices.flat[0].platform
        return compiler.options(platform, *compiler.purposes_of(self.config))

    def _init(self) -> State:
        """The full padded state on one device; only its shapes are used."""
        params = full_parameters(self.model, self.layout, self.config.train.seed)
        params = self.sharding.cast_frozen(params, self.execution.compute_dtype)
        return self.unplaced(self.sharding.pad(params))
