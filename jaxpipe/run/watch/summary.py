"""Tables printed before a run: mesh, stages, schedule, bubbles and bytes per rank."""

import math
from typing import Any

import jax
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.config import Config
from jaxpipe.config.units import readable_bytes
from jaxpipe.core.executor.buffers import HOST
from jaxpipe.core.schedule import SimulationReport, Tables, simulate
from jaxpipe.model import FAMILIES
from jaxpipe.planning.advice import advise_on_in_flight
from jaxpipe.schedules import draw_timeline
from jaxpipe.training.trainer import Trainer

Tree = Any
_WIDEST = 40  # ticks; a longer timeline does not fit a terminal and is not shown


def summary(trainer: Trainer) -> RenderableType:
    """Tables and a timeline to print before the first step; allocates nothing on devices."""
    tables = trainer.pipeline.tables
    report = simulate(trainer.schedule, lockstep=tables.lockstep)
    parts: list[RenderableType] = [
        _run_table(trainer, tables, report),
        _stage_table(trainer, tables),
    ]
    if tables.ticks <= _WIDEST:
        parts.append(Text(draw_timeline(trainer.schedule, tables.lockstep), no_wrap=True))
    return Group(*parts)


def _run_table(trainer: Trainer, tables: Tables, report: SimulationReport) -> Table:
    config = trainer.config
    parallel, train, model = config.parallel, config.train, config.model
    device = trainer.mesh.devices.flat[0]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shared = f" / cp={parallel.cp}" if parallel.cp > 1 else ""
    cut = f", in {parallel.slices} slices" if parallel.slices > 1 else ""
    for name, value in {
        "model": f"{model.parameter_count():,} parameters, {model.n_layers} layers",
        **({"adapters": _adapters(config)} if config.lora.rank else {}),
        "mesh": f"{parallel.mesh} on {device.device_kind}",
        "batch": (
            f"{train.grad_accum_steps} microbatches x {train.microbatch_size} sequences x "
            f"dp={parallel.dp}{shared} x {train.seq_len} tokens = {config.tokens_per_step:,}{cut}"
        ),
        "precision": f"{train.compute_dtype} compute, float32 parameters and sums"
        + ("" if train.fp8 == "none" else f", products of layers in fp8 ({train.fp8} scaling)"),
        "schedule": (
            f"{trainer.schedule.name}, {tables.ticks} ticks, of which a transfer takes "
            f"{tables.lockstep.transfer_ticks}, {train.rematerialisation}"
        ),
        "embedding, head": (
            "on all pipeline ranks, each with a shard of the vocabulary"
            if tables.lockstep.vocab_parallel
            else "embedding on the first pipeline rank, head on the last"
        ),
        "idle time": (
            f"{report.bubble_scan:.1%} (bubble, for equal op times); "
            f"{report.bubble_global:.1%} if ranks ran asynchronously"
        ),
        **({"less idle time": advice} if (advice := advise_on_in_flight(trainer.plan)) else {}),
        "learning rate": _learning_rate(config),
        **({"experts": trainer.grouped.note} if trainer.grouped.note else {}),
    }.items():
        table.add_row(name, value)
    return table


def _adapters(config: Config) -> str:
    """Rank, factor and weights of low-rank adapters."""
    lora = config.lora
    on = ", ".join(lora.targets) or "all weights of the layers"
    return f"rank {lora.rank}, alpha {lora.alpha:g} on {on}; all other parameters are frozen"


def _learning_rate(config: Config) -> str:
    """Peak, warm-up and decay; for a run that ends within warm-up its last rate."""
    optimizer, steps = config.optimizer, config.train.steps
    words = f"{optimizer.lr:.2e} after {optimizer.warmup_steps} steps of warm-up"
    if optimizer.warmup_steps > steps:
        last = optimizer.lr * steps / optimizer.warmup_steps
        return f"{words}, of which this run has {steps}: it ends at {last:.2e}"
    return f"{words}, then {optimizer.decay}"


def _stage_table(trainer: Trainer, tables: Tables) -> Table:
    shapes, pp = trainer.state_shapes, trainer.config.parallel.pp
    planned = trainer.plan.memory
    per_rank = {
        "parameters": _bytes_per_rank(shapes.params),
        "optimizer": _bytes_per_rank(shapes.optimizer),
        "activations": planned.activations,
    }
    if planned.host:
        per_rank["on the host"] = planned.host
    table = Table(
        "pipeline rank", "layers", "in flight", *(f"{name}" for name in per_rank), box=None
    )
    for rank in range(pp):
        table.add_row(
            str(rank),
            ", ".join(_stages_of(trainer, rank)),
            str(tables.rank_slots[rank].for_w),
            *map(readable_bytes, per_rank.values()),
        )
    return table


def _stages_of(trainer: Trainer, rank: int) -> list[str]:
    """The layers of each stage on a pipeline rank, with embedding and head, as text."""
    layout, placement, stages = trainer.layout, trainer.schedule.placement, []
    shared = trainer.execution.lockstep.vocab_parallel
    for stage, owner in enumerate(placement.rank_of):
        if owner == rank:
            first, count = layout.first_layer(stage), layout.layers_per_stage[stage]
            embedding = "embedding + " if stage == 0 and not shared else ""
            head = " + head" if stage == placement.stages - 1 and not shared else ""
            stages.append(f"{embedding}{first}..{first + count - 1}{head}")
    return [*stages, "shard of the vocabulary"] if shared else stages


def _bytes_per_rank(shapes: Tree) -> int:
    """Bytes of one device's shards, without arrays in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
        if leaf.sharding.memory_kind != HOST
    )


def closing_words(config: Config, carried: dict[str, Any], step: int) -> str:
    """The message after the last step: where the results are, and what to do next.

    Args:
      config: of the run.
      carried: what its checkpoints keep of the tokenizer (`CheckpointStore.carried`).
      step: the last.
    """
    directory = config.run.dir
    saved = f"{directory}/checkpoints/{step}"
    on_cpu = " runtime.cpu_devices=1" * bool(config.runtime.cpu_devices)
    prompt = ServingFiles.from_meta(carried).example_prompt
    export = f", `python -m jaxpipe.checkpoint export {saved} OUT_DIR` for transformers"
    write = f", or to let it write `python -m jaxpipe.generate {directory} {prompt}{on_cpu}`"
    return (
        f"done: {step} steps; saved in {saved}, numbers of all steps in "
        f"{directory}/metrics.jsonl; next: a larger train.steps to train on"
        f"{export * bool(FAMILIES[config.model.family].formats)}{write * bool(prompt)}"
    )
