"""Steps in float64: on a mesh as a run makes them, and on one device by the reference."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax
from msgspec import structs

from jaxpipe.config import Config, DataConfig, ParallelConfig
from jaxpipe.core.contract import StageFunctions
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.carry import Carry
from jaxpipe.core.executor.chunk import Chunk
from jaxpipe.core.executor.layer_run import LayerRun
from jaxpipe.core.executor.program import DeviceProgram
from jaxpipe.core.executor.reference import StepOutput, step_ref
from jaxpipe.core.executor.step_data import StepData
from jaxpipe.core.executor.tick import DeviceWork
from jaxpipe.core.schedule import Tables
from jaxpipe.lab.verification.observed import Observed
from jaxpipe.lab.verification.problem import Batch, documents_as_rows, float64_values
from jaxpipe.model.layers.moe.reference import one_hot
from jaxpipe.model.neighbours import neighbour_rows
from jaxpipe.planning import Devices, resolve
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
Alter = Callable[[StageFunctions, Config], StageFunctions]
AlterTables = Callable[[Tables], Tables]
AlterRun = Callable[[LayerRun], LayerRun]


@dataclass(frozen=True)
class AlteredProgram(DeviceProgram):
    """A device's program whose runs of layers are not those of its parameters."""

    alter_run: AlterRun = lambda run: run

    def start(self, *arguments: Any) -> tuple[DeviceWork, StepData, Carry]:
        """As of `DeviceProgram`, with altered runs."""
        work, step, carry = super().start(*arguments)
        chunks = [Chunk(tuple(map(self.alter_run, chunk.runs))) for chunk in work.chunks]
        return replace(work, chunks=tuple(chunks)), step, carry


@dataclass(frozen=True)
class AlteredPipeline(Pipeline):
    """A pipeline whose tables or runs of layers are not those of its schedule and layout."""

    alter_tables: AlterTables = lambda tables: tables
    alter_run: AlterRun = lambda run: run

    @cached_property
    def tables(self) -> Tables:
        """The altered tables."""
        return self.alter_tables(super().tables)

    def device_program(self, *arguments: Any) -> DeviceProgram:
        """What a device runs, with altered runs of layers."""
        own = super().device_program(*arguments)
        of_own = [getattr(own, field.name) for field in fields(own)]
        return AlteredProgram(*of_own, self.alter_run)


@dataclass(frozen=True)
class Float64Trainer(Trainer):
    """A trainer that computes in the dtype of its parameters.

    Attributes:
      alter, alter_tables, alter_run: change the model's functions, the tables, and every run of
        layers; None: nothing. Faults are planted here.
    """

    alter: Alter | None = None
    alter_tables: AlterTables | None = None
    alter_run: AlterRun | None = None

    @classmethod
    def of(cls, config: Config) -> "Float64Trainer":
        """The trainer of a configuration, with the program of its own kind of devices, on CPUs."""
        plan = resolve(config, Devices.planned(config))
        return cls(plan, jax.devices()[: config.parallel.devices])

    @cached_property
    def execution(self) -> Execution:
        """How the schedule is executed, without a cast."""
        return replace(super().execution, compute_dtype=None, grad_reduce_dtype=None)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The model on the mesh, as altered."""
        one = super().pipeline
        if self.alter:
            one = replace(one, functions=self.alter(one.functions, self.config))
        altered = {"alter_tables": self.alter_tables, "alter_run": self.alter_run}
        if given := {name: alter for name, alter in altered.items() if alter}:
            own = {field.name: getattr(one, field.name) for field in fields(one)}
            one = AlteredPipeline(**own, **given)
        return one

    def state_with(self, embed_head: Tree, layers: list[Tree], variables: Tree) -> State:
        """The state of step 0 with these full parameters and variables."""
        full = {"embed_head": embed_head, "layers": self.layout.stack(layers)}
        params = self.sharding.pad(full)
        params = jax.device_put(params, self.sharding.named_shardings(params))
        variables = jax.device_put(variables, self.state_shardings.variables)
        return self.fresh(params)._replace(variables=variables)

    @cached_property
    def compiled_step(self) -> Callable[[State, Tree], tuple[State, Tree, StepOutput]]:
        """Compiled `step_with_outputs`, which keeps the state that it is given."""
        shardings = self.state_shardings, self.sharder.sharding
        return jax.jit(
            self.step_with_outputs,
            in_shardings=shardings,
            out_shardings=(self.state_shardings, None, None),
            compiler_options=self.compiler_options,
        )

    def observe(self, state: State, batch: Tree) -> tuple[State, Observed]:
        """The state after a step on a batch of the devices, and what the step computes."""
        after, metrics, outputs = jax.block_until_ready(self.compiled_step(state, batch))
        return after, Observed.of(self, state, after, metrics, outputs)


def gpipe_on(config: Config, **mesh: int) -> ParallelConfig:
    """GPipe on a mesh; in slices only where experts count their loads, which are of a slice."""
    slices = config.layer_slices if config.model.routed_experts else 1
    return ParallelConfig(
        **mesh, schedule="gpipe", slices=slices, vocab_parallel_pp=False, allow_underfilled=True
    )


@dataclass(frozen=True)
class Reference:
    """Steps on one device: no pipeline, no mesh, plain experts, documents one by one.

    Documents of packed rows stay in their rows where experts or dropout depend on the row.
    """

    config: Config

    @cached_property
    def trainer(self) -> Float64Trainer:
        """The trainer of one device, whose update, metrics and form of the state are used."""
        config, alone = self.config, gpipe_on(self.config)
        size = config.batch_shape["batch_size"]
        train = structs.replace(
            config.train, microbatch_size=size, loss_chunks=1, remat="none", remat_layers=0,
            offload_layers=0, offload_moments=False,
        )  # fmt: skip
        data = DataConfig(source="dummy") if self.separates else config.data
        runtime = structs.replace(config.runtime, cpu_devices=1)
        one = structs.replace(config, parallel=alone, train=train, data=data, runtime=runtime)
        return Float64Trainer.of(one)

    @property
    def separates(self) -> bool:
        """Whether documents of packed rows are rows of their own."""
        model = self.config.model
        drops = model.dropout or model.attention_dropout or self.config.lora.dropout
        is_of_tokens = self.config.train.loss == "cross_entropy"  # another may be of whole rows
        packed = bool(self.config.data.documents)
        return packed and is_of_tokens and not model.routed_experts and not drops

    @cached_property
    def functions(self) -> StageFunctions:
        """The model's functions, with experts that all take all tokens."""
        return self.trainer.model.with_options(ops={"dispatch": one_hot}).functions

    def init(self) -> State:
        """The state of step 0 in float64."""
        return self.trainer.state_with(*float64_values(self.trainer.model, self.config))

    def observe(self, state: State, batch: Batch, position: int) -> tuple[State, Observed]:
        """The state after a step on a host batch, and what the step computes."""
        trainer = self.trainer
        if self.separates:
            rows = documents_as_rows(batch)
            placed = rows | neighbour_rows(rows, self.config.model)
        else:
            placed = trainer.put(batch, position)
        outputs = step_ref(
            self.functions,
            state.params["embed_head"],
            trainer.layout.unstack(state.params["layers"]),
            placed,
            trainer.schedule.slices,
            state.variables,
        )
        stacked = trainer.layout.stack(jax.device_get(outputs.gradients["layers"]))
        outputs = outputs._replace(gradients=outputs.gradients | {"layers": stacked})
        after, metrics = self._update(state, outputs)
        return after, Observed.of(trainer, state, after, metrics, outputs)

    @cached_property
    def _update(self) -> Callable[[State, StepOutput], tuple[State, Tree]]:
        return jax.jit(self.trainer.after)
