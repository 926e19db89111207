"""The smallest run with the same settings as a given one. Importing this imports no jax."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from jaxpipe.config import (
    Config,
    ConfigError,
    LogConfig,
    ParallelConfig,
    TrainConfig,
)
from jaxpipe.config.rules import without_unread
from jaxpipe.lab.verification.smaller_loops import SmallerLoops
from jaxpipe.lab.verification.smaller_model import least_layers, smaller_model
from jaxpipe.planning import Devices, RunPlan, resolve

MOST_DEVICES = 16  # virtual CPU devices, of which each has threads of its own
_LENGTH = 16  # tokens of a sequence, at least


@dataclass(frozen=True)
class SmallerRun:
    """A run as it is verified.

    Attributes:
      config: its settings, for devices of the same kind as before.
      changes: settings of the mesh and the schedule that had to change, each as a sentence.
      unchecked: settings that float64 on CPUs cannot show, each with the reason.
    """

    config: Config
    changes: tuple[str, ...]
    unchecked: tuple[str, ...]


def shrink(config: Config) -> SmallerRun:
    """Return the smallest run that keeps every axis, option, layer kind, loop and schedule.

    Raises `ConfigError` if the run itself breaks a rule, as training would.
    """
    config = _with_known_replicas(config)
    plan = resolve(config, Devices.planned(config))
    loops = SmallerLoops.of(plan)
    smaller = _fewest_layers(plan, loops)
    unchecked = (*_unchecked(plan.config), *loops.unchecked(smaller))
    return SmallerRun(smaller.config, tuple(_changes(plan.config, smaller.config)), unchecked)


def _fewest_layers(plan: RunPlan, loops: SmallerLoops) -> RunPlan:
    """The smaller run with the fewest layers per stage that keeps loops and what is of some layers.

    Without one, the smaller run that was tried first.
    """
    train = plan.config.train
    of_some = train.remat_layers > 0 or 0 < train.offload_layers < _shortest(plan.layers)
    least = max(loops.most, 1 + of_some)
    # More of them where a split shortens a stage, or other kinds divide the layers of one.
    for per_stage in range(least, 2 * (least + 1)):
        smaller = _smaller_plan(plan, loops, per_stage)
        if _shortest(smaller.layers) > of_some and not loops.lost_kinds(smaller):
            return smaller
    return _smaller_plan(plan, loops, least)


def _shortest(layers: Sequence[int]) -> int:
    """The layers of the shortest stage that has some."""
    return min(filter(None, layers))


def _smaller_plan(plan: RunPlan, loops: SmallerLoops, per_stage: int) -> RunPlan:
    """The plan of the smaller run with this many layers in most stages."""
    before = plan.config
    parallel = _smaller_mesh(before.parallel)
    stages = plan.schedule.stages * parallel.pp // before.parallel.pp
    least = least_layers(before.model, before.parallel, parallel, loops)
    parallel, layers = _smaller_split(parallel, plan.layers, stages, per_stage, least)
    parallel = replace(parallel, unroll_layers=loops.unroll_layers(layers))
    sizes = before.model, before.parallel, parallel, loops
    multiple = smaller_model(*sizes, layers=layers, length=_LENGTH).shard_multiple
    train = _smaller_step(replace(before, parallel=parallel), multiple)
    model = smaller_model(*sizes, layers=layers, length=train.seq_len)
    clip = min(before.optimizer.clip_norm, 0.1)  # below the norm, so that it clips
    warmup = min(before.optimizer.warmup_steps, 10)  # else updates vanish beside parameters
    checkpoint = replace(before.checkpoint, resume="none")
    devices = parallel.devices if before.runtime.cpu_devices else 0
    smaller = replace(
        before,
        model=_in_float64(model, parallel),
        parallel=parallel,
        train=train,
        lora=replace(before.lora, rank=min(before.lora.rank, 3), adapter=""),
        optimizer=replace(before.optimizer, clip_norm=clip, warmup_steps=warmup),
        data=replace(before.data, max_documents=min(before.data.max_documents, 4)),
        checkpoint=checkpoint,
        log=LogConfig(),
        runtime=replace(before.runtime, cpu_devices=devices, min_devices=0),
        debug=replace(before.debug, print_messages=False),
    )  # fmt: skip
    return _with_enough_microbatches(without_unread(smaller), before.train.grad_accum_steps)


def _with_known_replicas(config: Config) -> Config:
    """Fill in `parallel.dp=-1`: two replicas of each kind that the other settings form."""
    parallel = config.parallel
    if parallel.dp != -1:
        return config
    groups = parallel.dp_replicate * math.lcm(parallel.cp, parallel.ep_replicas)
    return replace(config, parallel=replace(parallel, dp=max(groups, 2)))


def _smaller_mesh(parallel: ParallelConfig) -> ParallelConfig:
    """The mesh, with axes of two devices where it has too many; a schedule's file fixes pp."""
    if parallel.devices <= MOST_DEVICES:
        return parallel
    pp = parallel.pp if parallel.schedule_file else min(parallel.pp, 2)
    heads = min(parallel.cp_heads, 2)
    cp = 4 if 1 < parallel.cp_heads < parallel.cp else min(parallel.cp, 2)
    axes = parallel.dp_replicate, parallel.ep_replicas, parallel.tp
    rp, ep, tp = (min(size, 2) for size in axes)
    per_host = min(parallel.ep_per_host, 2)
    if parallel.ep_hosts > 1 and not parallel.ep_over_tp:
        ep = 2 * per_host  # two hosts
    rest = parallel.dp > parallel.dp_replicate * math.lcm(parallel.cp, parallel.ep_replicas)
    dp = rp * math.lcm(cp, ep)
    if rest and pp * dp * tp < MOST_DEVICES:
        dp *= 2
    in_flight = parallel.in_flight
    if in_flight and pp < parallel.pp:
        in_flight = max(round(in_flight * (2 * pp - 1) / (2 * parallel.pp - 1)), pp)
    return replace(
        parallel, pp=pp, dp=dp, tp=tp, cp=cp, cp_heads=heads, dp_replicate=rp,
        ep=ep * tp if parallel.ep_over_tp else ep, ep_per_host=per_host,
        in_flight=in_flight,
    )  # fmt: skip


def _smaller_split(
    parallel: ParallelConfig, counts: tuple[int, ...], stages: int, per_stage: int, least: int
) -> tuple[ParallelConfig, int]:
    """The split of at least `least` layers over stages, and their number.

    Most stages have `per_stage` layers. Those of which a list says more have one more, and a first
    or last stage that has its own number, or counts embedding or head, has fewer than the others.

    Args:
      parallel: of the run, on the smaller mesh.
      counts: layers of each stage of the run.
      stages: number of stages of the smaller run.
      per_stage: layers in most of them.
      least: layers that have every kind.
    """
    sizes: dict[str, Any] = {
        "slices": min(parallel.slices, 4),
        "ep_buffer_factor": 0.0,
        "grad_reduce_dtype": "float32",
        "costs": "",
    }
    uneven = stages > 1 and sum(counts) % len(counts) > 0
    layers = max(stages * per_stage + uneven, least)
    ends = parallel.first_stage_layers, parallel.last_stage_layers
    if isinstance(parallel.layer_split, tuple):
        fewer = [counts[i * len(counts) // stages] for i in range(stages)]
        split = [min(count, per_stage + (count > min(counts))) for count in fewer]
        split[-1] += max(least - sum(split), stages + uneven - sum(split), 0)
        sizes["layer_split"], layers = tuple(split), sum(split)
    elif any(ends):
        first, last = (min(end, max(per_stage - 1, 1)) for end in ends)
        others = stages - (first > 0) - (last > 0)
        layers = max(first + last + max(per_stage, 2) * others, least)
        if not others:
            first, last = (first, layers - first) if last else (layers, 0)
        sizes |= {"first_stage_layers": first, "last_stage_layers": last}
    elif parallel.layer_split == "weighted":
        weights = min(parallel.input_weight, 1), min(parallel.output_weight, 1)
        layers = max(stages * (per_stage + max(weights)) - sum(weights), least)
        sizes |= {"input_weight": weights[0], "output_weight": weights[1]}
    return replace(parallel, **sizes), layers


def _smaller_step(config: Config, multiple: int) -> TrainConfig:
    """The settings of a step with short sequences, in float64; `multiple` is that of shards."""
    train = config.train
    chunks = min(train.loss_chunks, 2)
    unit = config.sequence_shards * chunks * multiple
    return replace(
        train,
        seq_len=unit * max(2, -(-_LENGTH // unit)),
        microbatch_size=min(train.microbatch_size, 2 - train.microbatch_size % 2),
        loss_chunks=chunks,
        length_bucket=unit if train.length_bucket else 0,
        pad_to_multiple_of=chunks * multiple,
        compute_dtype="float32",
        fp8="none",
        fused_steps=1,
        remat_layers=min(train.remat_layers, 1),
        offload_layers=min(train.offload_layers, 1),
        corruption_check_every=0,
    )


def _in_float64(model: Any, parallel: ParallelConfig) -> Any:
    """The model without what only GPUs compute, and without drops that depend on the mesh."""
    changes: dict[str, Any] = {"attention": "xla"}
    if _drops_by_shard(model, parallel):
        changes["capacity_factor"] = model.n_experts / model.experts_per_token
    return replace(model, **changes)


def _drops_by_shard(model: Any, parallel: ParallelConfig) -> bool:
    """Whether experts have a capacity for each shard of a sequence."""
    shards = parallel.cp > 1 or parallel.ep_over_tp
    return shards and getattr(model, "capacity_factor", 0) > 0


def _with_enough_microbatches(config: Config, most: int) -> RunPlan:
    """The plan with the fewest microbatches with which a schedule exists.

    They are two per pipeline rank or more; a schedule's file fixes them.
    """
    least = most if config.parallel.schedule_file else min(max(2 * config.parallel.pp, 4), most)
    for count in range(least, most):
        smaller = replace(config, train=replace(config.train, grad_accum_steps=count))
        try:
            return resolve(smaller, Devices.planned(smaller))
        except ConfigError:
            continue
    return resolve(config, Devices.planned(config))


def _changes(before: Config, after: Config) -> Iterator[str]:
    """Yield what changed of the mesh, the schedule's sizes and the loops."""
    sizes = (
        "pp", "dp", "tp", "cp", "cp_heads", "ep", "ep_per_host", "dp_replicate", "in_flight",
        "slices", "unroll_layers",
    )  # fmt: skip
    for name in sizes:
        old, new = (getattr(config.parallel, name) for config in (before, after))
        if old != new:
            yield f"parallel.{name}: {new} instead of {old}"
    counts = [config.train.grad_accum_steps for config in (before, after)]
    if counts[0] != counts[1]:
        yield f"train.grad_accum_steps: {counts[1]} instead of {counts[0]}"
    layers = [config.model.n_layers for config in (before, after)]
    if layers[0] != layers[1]:
        yield f"model.n_layers: {layers[1]} instead of {layers[0]}"


def _unchecked(config: Config) -> Iterator[str]:
    """Yield the settings of a run that its verification leaves out, each with the reason."""
    model, parallel, train = config.model, config.parallel, config.train
    if train.compute_dtype == "float16" and train.skip_non_finite:
        yield "the loss scale of train.compute_dtype='float16': float64 needs none"
    if train.compute_dtype != "float32":
        yield f"train.compute_dtype={train.compute_dtype!r}: computed in float64 instead"
    if train.fp8 != "none":
        yield f"train.fp8={train.fp8!r}: products in 8 bits round, so they have no exact result"
    if model.attention == "cudnn":
        yield "model.attention='cudnn': a kernel of GPUs in 16 bits; plain products instead"
    if parallel.grad_reduce_dtype != "float32":
        yield f"parallel.grad_reduce_dtype={parallel.grad_reduce_dtype!r}: reduced in float64"
    if parallel.ep_buffer_factor:
        yield f"parallel.ep_buffer_factor={parallel.ep_buffer_factor}: drops depend on the mesh"
    if _drops_by_shard(model, parallel):
        yield (
            f"what model.capacity_factor={model.capacity_factor} drops: it is counted per shard of "
            f"a sequence, so capacity for all is given"
        )
    if train.fused_steps > 1:
        yield f"train.fused_steps={train.fused_steps}: its steps are verified one by one"
    if train.corruption_check_every:
        yield "train.corruption_check_every: it repeats steps and changes none"
    if parallel.costs:
        yield f"parallel.costs={parallel.costs!r}: the schedule is searched for estimates"
    if isinstance(parallel.memory_limit, str) and parallel.memory_limit[-1:] not in ("", "p"):
        yield f"parallel.memory_limit={parallel.memory_limit!r}: it does not bind a small model"
