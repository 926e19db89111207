"""Compile a configuration's training step for GPUs that are not present, and report on it."""

import tempfile
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxpipe.config import ConfigError
from jaxpipe.core.executor.buffers import HOST
from jaxpipe.core.jax_internals import set_memory_kinds
from jaxpipe.lab.gpu import cards
from jaxpipe.lab.gpu.collectives import Collectives
from jaxpipe.lab.gpu.products import ProductCount, count_products
from jaxpipe.lab.gpu.program import GraphCoverage, Program, read_graph_coverage
from jaxpipe.lab.gpu.seconds import StepSeconds, estimate_seconds
from jaxpipe.lab.gpu.temporaries import Temporary, read_temporaries
from jaxpipe.planning import RunPlan
from jaxpipe.planning.limits import PLANNED_SHARE
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.runtime.environment import usable_share
from jaxpipe.runtime.programs import compiler
from jaxpipe.runtime.programs.program_store import save_program
from jaxpipe.training.fused import FusedSteps
from jaxpipe.training.offloaded_moments import map_moments
from jaxpipe.training.trainer import Trainer

INSTALL = "compiling for GPUs needs their compiler: pip install -e '.[aot]'"
_CUDNN = (
    "model.attention='cudnn' cannot be compiled without cuDNN: pip install --no-deps "
    "nvidia-cudnn-cu13 (0.5 GB), or give model.attention=xla."
)

_SPARE = 4  # times the memory of a card: no step that a card could run would take as much
_FEW = 0.8  # of the bytes of collectives in the loop: if fewer are hidden, memory may be why
_THUNKS = "*thunk_sequence_after_thunk_passes.txt"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes, without CUDA's context, NCCL, CUDA graphs and fragmentation.

    Attributes:
      peak: largest live memory, arguments included; outputs that alias arguments count once.
      aliased: outputs that reuse the memory of arguments.
      host: memory used on the host, not part of `peak`.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int


@dataclass(frozen=True)
class WithRoom:
    """The same step, compiled for a card of the kind whose memory is not short.

    Attributes:
      peak: bytes of a device.
      hidden: share of the bytes of collectives in the loop that are behind compute.
    """

    peak: int
    hidden: float


@dataclass(frozen=True)
class CompiledReport:
    """Facts about the compiled step.

    Attributes:
      memory: of the card, in bytes.
      usable: bytes of `memory` that jax would reserve.
      temporaries: arrays live at the peak, the largest first.
      ops: seconds by the program's instructions.
      step: seconds of a step by the instructions (None if unknown) and by the plan.
      seconds: time that compiling took.
      dropped: options that the installed XLA lacks.
      phases: phases of phased permutes, which are synchronous; 1: permutes are not phased.
      note: how the experts' matrix products run, as a run logs at its start.
      with_room: the step with more memory, if it does not fit, or nearly fills the memory and hides
        few collectives.
    """

    card: str
    devices: int
    topology: str
    memory: int
    usable: int
    bytes: DeviceMemory
    program: Program
    collectives: Collectives
    products: tuple[ProductCount, ...]
    graphs: GraphCoverage | None
    temporaries: tuple[Temporary, ...]
    ops: StepSeconds
    step: tuple[float | None, float]
    seconds: float
    dropped: tuple[str, ...]
    phases: int = 1
    note: str = ""
    with_room: WithRoom | None = None

    @property
    def ran_short(self) -> bool:
        """Whether XLA hides fewer collectives than it would with more memory."""
        if self.with_room is None:
            return False
        return self.collectives.hidden_in_loop < _FEW * self.with_room.hidden

    @property
    def fits(self) -> bool:
        """Whether the step's peak fits the memory that jax would reserve."""
        return self.bytes.peak <= self.usable


def check_step(plan: RunPlan, card: str, save: Path | None = None) -> CompiledReport:
    """Compile the step of a plan that was resolved for a card, and save it in a directory if given.

    Raises `ConfigError` where the compiler or cuDNN is missing, the directory is not writable, or a
    step to be saved calls cuDNN.
    """
    if save and plan.config.model.attention == "cudnn":
        raise ConfigError(
            "--save with model.attention='cudnn': cuDNN builds its kernels on a GPU alone, so what "
            "is compiled without one cannot run; save with model.attention=xla, or let the run "
            "compile and keep the step in its compile cache (runtime.compile_cache)."
        )
    memory = int(plan.devices.memory)
    usable = int(memory * usable_share())
    topology = cards.topology(plan.config.parallel.devices)
    trainer = Trainer(plan, describe_devices(card, usable, topology))
    own = compiler.wanted("gpu", *compiler.purposes_of(plan.config))
    purposes = ("deviceless", *["costs"] * cards.has_costs(card))
    options, _ = compiler.accepted(chain(*map(compiler.of_purpose, purposes)))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        name, lowered = lower_step(trainer)
        compiled = _compile(lowered, options | {"xla_dump_to": folder})
        seconds = time.perf_counter() - start
        dump = next(Path(folder).glob(_THUNKS), None)
        around = int(name == "train_steps")  # the loop over steps
        graphed = read_graph_coverage(dump.read_text(), around) if dump else None
        largest = read_temporaries(Path(folder))
    if save:
        devices = list(trainer.mesh.devices.flat)
        save_program(save, name, lowered, compiled, devices, trainer.compiler_options)
    program = Program(compiled.as_text())
    ops = estimate_seconds(program, DEVICES[card.upper()], cards.card_bandwidth(card))
    layers = sum(map(len, trainer.layout.chunk_kinds))
    taken, collectives = _read_memory(compiled), Collectives(program, trainer.mesh.shape)
    nearly_full = taken.peak > usable * PLANNED_SHARE
    short = nearly_full and (taken.peak > usable or collectives.hidden_in_loop < _FEW)
    larger = describe_devices(card, _SPARE * memory, topology) if short else ()
    return CompiledReport(
        card=card,
        devices=trainer.mesh.size,
        topology=topology,
        memory=memory,
        usable=usable,
        bytes=taken,
        program=program,
        collectives=collectives,
        products=count_products(program),
        graphs=graphed,
        temporaries=largest,
        ops=ops,
        step=ops.step(plan, layers),
        seconds=seconds,
        dropped=tuple(compiler.accepted(own)[1]),
        phases=plan.lockstep.phases,
        note=trainer.grouped.note,
        with_room=_compile_with_room(plan, larger, options) if larger else None,
    )


def _compile_with_room(
    plan: RunPlan, devices: tuple[jax.Device, ...], options: dict[str, Any]
) -> WithRoom:
    """Compile the step again, for devices with more memory."""
    trainer = Trainer(plan, devices)
    compiled = _compile(lower_step(trainer)[1], options)
    program = Program(compiled.as_text())
    collectives = Collectives(program, trainer.mesh.shape)
    return WithRoom(_read_memory(compiled).peak, collectives.hidden_in_loop)


def describe_devices(card: str, usable: int, topology: str) -> tuple[jax.Device, ...]:
    """Return cards that are not present, with so many usable bytes, in a topology ("1x1x8")."""
    config = cards.set_usable_memory(cards.target_config(card), usable)
    try:
        described = topologies.get_topology_desc(
            card, "cuda", target_config=config, topology=topology
        )
    except NotImplementedError as error:
        raise ConfigError(f"{INSTALL}.") from error
    return tuple(described.devices)


def lower_step(trainer: Trainer, platform: str = "cuda") -> tuple[str, jax.stages.Lowered]:
    """Lower the program of a run, with one step or several, from abstract arrays.

    Returns:
      its name in the run, and the lowered program.
    """
    batch, steps = trainer.sharder.shapes(trainer.config.train.seq_len), FusedSteps(trainer)
    batch = {
        name: jax.ShapeDtypeStruct(
            (steps.count * one.shape[0], *one.shape[1:]), one.dtype, sharding=one.sharding
        )
        for name, one in batch.items()
    }
    name = "train_steps" if steps.count > 1 else "train_step"
    program = steps.train_steps if steps.count > 1 else trainer.train_step
    # Kernels ask for the default device's kind while they are traced.
    with jax.default_device(trainer.mesh.devices.flat[0]):
        traced = program.trace(trainer.state_shapes, batch)
    lowered = traced.lower(lowering_platforms=(platform,))
    if trainer.config.train.offload_moments:
        kinds = jax.tree.map(lambda _: "device", trainer.state_shapes)
        kinds = kinds._replace(optimizer=map_moments(lambda _: HOST, kinds.optimizer))
        set_memory_kinds(lowered, jax.tree.leaves((kinds, jax.tree.map(lambda _: "device", batch))))
    return name, lowered


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except RuntimeError as error:
        if "cuDNN not found" in str(error):
            raise ConfigError(_CUDNN) from error
        if any(part in str(error) for part in ("PTX compilation provider", "libdevice")):
            raise ConfigError(f"{INSTALL} ({str(error).splitlines()[0]}).") from error
        raise


def _read_memory(compiled: jax.stages.Compiled) -> DeviceMemory:
    analysis = compiled.memory_analysis()
    everything = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    return DeviceMemory(
        # XLA's peak counts arguments in host memory too, which can exceed the sum on the device.
        peak=min(analysis.peak_memory_in_bytes, everything),
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        host=analysis.host_temp_size_in_bytes + analysis.host_argument_size_in_bytes,
    )
