"""The plan against the trainer's own bytes and the split's residuals."""

from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import pytest
from oracles.decoder import hidden_bytes, layer_bytes, state_bytes

from jaxpipe import config as configs
from jaxpipe.core.contract import Context
from jaxpipe.core.executor.stage import EmbedHeadFunction
from jaxpipe.core.schedule import MemoryCosts, lower, peak_memory
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.planning import Hardware, advise, analytic, arrange, estimate, estimates
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.memory import ring_bytes
from jaxpipe.schedules import BUILDERS
from jaxpipe.training.trainer import Trainer

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
CONFIGS = Path(__file__).parents[2] / "configs"


def estimates_of(*overrides, ticks=1):
    config = configs.load(SMALL, [*overrides, f"parallel.transfer_ticks={ticks}"])
    seconds = analytic(config, Hardware(link=1e15))
    found, refused = estimates(config, seconds)
    return config, refused, {one.label: one for one in found}


def estimate_of(*overrides):
    """Return the configuration, and the estimate of the schedule that it names."""
    config = configs.load(SMALL, [*overrides, "parallel.transfer_ticks=1"])
    return config, estimate(arrange(config), analytic(config, Hardware()))


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_bytes_are_the_trainers(pp, remat):
    overrides = (f"parallel.pp={pp}", "model.n_layers=6", f"train.remat={remat}",
                 "train.grad_accum_steps=8", "parallel.dp=1",
                 "parallel.vocab_parallel_pp=false")  # fmt: skip
    config, estimated = estimate_of(*overrides)
    trainer = Trainer.resolve(config, tuple(jax.devices()[:pp]))
    predicted = estimated.bytes

    def on_a_device(shapes, shardings):
        leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
        shards = [(s.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf, s in leaves]
        return sum(int(jax.numpy.prod(jax.numpy.array((1, *shape)))) * n for shape, n in shards)

    params = on_a_device(trainer.state_shapes.params, trainer.state_shardings.params)
    assert predicted.parameters == params
    moments = on_a_device(trainer.state_shapes.optimizer, trainer.state_shardings.optimizer)
    assert 0 <= moments - predicted.optimizer <= 16  # the optimizer's own counters

    train = config.train
    ids = jax.ShapeDtypeStruct((train.microbatch_size, train.seq_len), "int32")
    x = jax.ShapeDtypeStruct((*ids.shape, config.model.d_model), train.compute_dtype)
    is_loop = len(trainer.layout.runs[0]) > 1  # its layers are stacked
    layer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1 + is_loop :], train.compute_dtype),
        trainer.state_shapes.params["layers"][0],
    )
    split = split_layer(
        trainer.model.layer, layer, x, Context({"inputs": ids, "targets": ids}), POLICIES[remat]
    )
    slots = lower(trainer.schedule, estimated.plan.lockstep).slots
    kept = (split.residuals.for_b, split.residuals.for_w, split.stash)
    rings = len(trainer.layout.ring_slot_kinds) * sum(
        n * sum(r.size * r.dtype.itemsize for r in values) for n, values in zip(slots[1:], kept)
    )
    messages = predicted.activations - rings
    assert messages == (slots.inbox + 3) * x.size * x.dtype.itemsize


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "interleaved_1f1b"])
def test_rings_are_what_the_fullest_rank_holds(schedule):
    """From the orders alone: the bytes that F allocates, B allocates and frees, and W frees."""
    path = CONFIGS / "llama3_70b_plan.toml"
    config = configs.load(path, [f"parallel.schedule={schedule}"])
    plan = arrange(config)
    (kind,) = costs_of(config).kinds.values()
    memory = MemoryCosts(
        F=kind.for_b + kind.for_w, B=kind.stash - kind.for_b, W=-kind.for_w - kind.stash
    )
    held = max(peak_memory(plan.schedule, memory))
    assert held <= ring_bytes(kind, plan.buffers).device <= 1.15 * held


def test_slices_are_planned_as_they_are_run():
    """Slices of activations, and keys and values of full sequences."""
    overrides = ("parallel.pp=2", "parallel.dp=1", "parallel.slices=4", "model.n_layers=4")
    config, refused, estimates = estimates_of(*overrides)
    one = estimates["1f1b"]
    slots, model, train = one.plan.tables.slots, config.model, config.train
    sizes = {"batch": train.microbatch_size, "seq_len": train.seq_len, "itemsize": 4}
    kept = layer_bytes(model, slices=4, **sizes)
    assert (slots.for_w, slots.state, slots.dstate) == (5, 2, 1)
    layer = 5 * (kept.for_b + kept.for_w) + 3 * state_bytes(model, **sizes)
    messages = (slots.inbox + 3) * hidden_bytes(model, slices=4, **sizes)
    assert one.bytes.activations == 2 * layer + messages
    schedule = Trainer.resolve(config, tuple(jax.devices()[:2])).schedule
    assert one.plan.tables.ticks == lower(schedule, one.plan.lockstep).ticks
    assert "zbv has no slices" in refused["zbv"]


@pytest.mark.slow(unless=["*-mesh0"])
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2), (2, 1, 4), (4, 2, 1)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("vocab", ["false", "true"])
def test_parameter_bytes_on_whole_meshes(mesh, zero_stage, vocab):
    sizes = dict(zip(("pp", "dp", "tp"), mesh))
    overrides = [f"parallel.{name}={size}" for name, size in sizes.items()]
    overrides += ["model.n_layers=4", "model.n_kv_heads=2", "model.tie_embeddings=true"]
    overrides += ["train.grad_accum_steps=8", f"parallel.zero_stage={zero_stage}"]
    overrides += [f"parallel.vocab_parallel_pp={vocab}"]
    config, estimated = estimate_of(*overrides)
    trainer = Trainer.resolve(config)
    predicted = estimated.bytes
    held = zip(
        jax.tree.leaves(trainer.state_shapes.params),
        jax.tree.leaves(trainer.state_shardings.params),
    )
    assert predicted.parameters == sum(4 * prod(s.shard_shape(leaf.shape)) for leaf, s in held)
    assert predicted.optimizer == 2 * predicted.parameters


def test_layers_that_every_action_gathers_are_whole_two_at_a_time():
    sizes = ("parallel.pp=1", "parallel.dp=2", "parallel.zero_stage=3")
    one, two, four = (
        estimate_of(*sizes, f"model.n_layers={layers}")[1].bytes.copies for layers in (1, 2, 4)
    )
    assert two - one == 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
    assert four == two


@pytest.mark.extended
def test_a_second_copy_of_the_stages_costs_its_messages():
    """DualPipe: each rank sends its layers, and receives their gradients, once a step."""
    sizes = ("parallel.pp=2", "parallel.dp=1", "model.n_layers=4", "train.grad_accum_steps=8",
             "train.compute_dtype=bfloat16")  # fmt: skip
    _, _, found = estimates_of(*sizes)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    one, other = found["dualpipe"], found["1f1b"]
    assert one.mirroring == pytest.approx(2 * layer * (2 + 4) / 0.85e15)
    assert one.seconds == one.report.scan_makespan + one.mirroring + one.update
    assert other.mirroring == 0


@pytest.mark.slow
def test_a_shared_vocabulary_makes_stages_equal():
    """All stages cost the same, the step is shorter, and no device needs more memory."""
    sizes = ("model.vocab_size=262144", "parallel.pp=4", "parallel.dp=1", "model.n_layers=16",
             "train.grad_accum_steps=16", "parallel.layer_split=even")  # fmt: skip
    _, _, apart = estimates_of(*sizes, "parallel.vocab_parallel_pp=false", ticks=2)
    config, _, together = estimates_of(*sizes, "parallel.vocab_parallel_pp=true", ticks=2)
    seconds = analytic(config, Hardware())
    alone = analytic(configs.load(SMALL, [*sizes, "parallel.transfer_ticks=2"]), Hardware())
    assert seconds.head == pytest.approx(alone.head)  # in four shards
    costs = seconds.costs((4,) * 4, shared_by=4)
    assert len(set(costs.F)) == 1
    whole = sum(seconds.costs((4,) * 4).F) + 4 * 2 * 3 * seconds.transfer  # four sums on a ring
    assert sum(costs.F) == pytest.approx(whole)
    for label in ("1f1b", "zb_h1", "dualpipe"):
        one, all_of_them = apart[label], together[label]
        assert all_of_them.report.scan_makespan < one.report.scan_makespan
        assert all_of_them.bytes.total < one.bytes.total


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "schedule_free"])
def test_bytes_of_moments(optimizer):
    sizes = ("parallel.pp=2", "parallel.tp=2", "train.grad_accum_steps=8")
    config, estimated = estimate_of(*sizes, f"optimizer.name={optimizer}")
    trainer = Trainer.resolve(config)
    held = zip(
        jax.tree.leaves(trainer.state_shapes.optimizer),
        jax.tree.leaves(trainer.state_shardings.optimizer),
    )
    # Counters and the coefficients of Muon's iteration are no moments.
    moments = sum(4 * prod(s.shard_shape(leaf.shape)) for leaf, s in held if leaf.size > 16)
    assert estimated.bytes.optimizer == moments


@pytest.mark.slow
def test_deferred_ends_take_what_the_head_leaves():
    sizes = ("parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=8", "model.n_layers=8",
             "parallel.vocab_parallel_pp=false")  # fmt: skip
    config, _, at_once = estimates_of(*sizes)
    _, _, deferred = estimates_of(*sizes, "parallel.defer_embed_head=true")
    trainer = Trainer.resolve(config, tuple(jax.devices()[:2]))
    decoder, shared = trainer.model, trainer.state_shapes.params["embed_head"]
    ids = jax.ShapeDtypeStruct((config.train.microbatch_size, config.train.seq_len), "int32")
    microbatch = {"inputs": ids, "targets": ids}
    x = jax.eval_shape(decoder.embed, shared, microbatch)
    trained = jax.tree.map(lambda _: True, shared)
    head = EmbedHeadFunction.trace(decoder.head, trained, shared, x, microbatch)
    head = head.split(shared, x, microbatch)
    kept = jax.tree.leaves((head.residuals.for_w, head.stash))
    for label in ("zb_h1", "1f1b", "zbv"):
        lockstep = replace(at_once[label].plan.lockstep, defer_embed_head=True)
        slots = lower(at_once[label].plan.schedule, lockstep).slots
        waits = slots.head * sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
        waits += (slots.embed + 1) * x.size * x.dtype.itemsize
        alike = estimate(replace(deferred[label].plan, lockstep=lockstep))
        more = alike.bytes.activations - at_once[label].bytes.activations
        assert more == waits


@pytest.mark.slow
def test_every_schedule_that_fits_the_sizes_is_there():
    _, refused, estimates = estimates_of(
        "parallel.pp=2", "model.n_layers=8", "train.grad_accum_steps=8", "parallel.dp=1"
    )
    assert {label.split()[0] for label in estimates} == set(BUILDERS)
    assert not refused
    assert estimates["gpipe"].bytes.activations > 3 * estimates["1f1b"].bytes.activations
    assert estimates["zbv"].report.bubble_span < estimates["1f1b"].report.bubble_span
    _, refused, _ = estimates_of("parallel.pp=3", "model.n_layers=6", "train.grad_accum_steps=8",
                                 "parallel.dp=1")  # fmt: skip
    assert "even pp" in refused["dualpipe"]


def test_a_bubble_out_of_reach_is_not_sought_with_ever_more_microbatches():
    config, one = estimate_of("parallel.pp=2", "parallel.dp=1")
    (sentence,) = advise(config, [one], memory=80e9, bubble=1e-3).sentences
    assert "not even train.grad_accum_steps=128 brings the bubble below 0.1%" in sentence


def test_a_stage_without_layers_takes_the_time_of_embedding_or_head():
    config = configs.load(SMALL, ["parallel.pp=4", "parallel.layer_split=[0,2,2,0]"])
    costs, seconds = arrange(config).costs, analytic(config, Hardware())
    assert (seconds.embed, *costs.F[1:3], seconds.head) == costs.F
    assert (seconds.embed_gradient, *costs.B[1:3], 0) == costs.B
    assert (0, *costs.W[1:3], 0) == costs.W
