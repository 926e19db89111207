"""The plan against the trainer's own bytes, the split's residuals, and its command line."""

import json
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import pytest
from oracles.decoder import hidden_bytes, layer_bytes, state_bytes

from jaxpipe import config as configs
from jaxpipe.config.units import parse_bytes
from jaxpipe.core.contract import Context
from jaxpipe.core.executor.stage import EmbedHeadFunction
from jaxpipe.core.schedule import MemoryCosts, lower, peak_memory
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.plan import main
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


@pytest.mark.slow
def test_seventy_billion_parameters_on_a_thousand_gpus(capsys):
    start = time.process_time()
    assert main([str(CONFIGS / "llama3_70b_plan.toml"), "--memory", "80GiB", "--json"]) == 0
    seconds = time.process_time() - start
    plan = json.loads(capsys.readouterr().out)
    rows = {row["schedule"]: row for row in plan["schedules"]}
    assert plan["best"] in rows
    assert rows[plan["best"]]["fits"]
    fastest = max(row["tokens_per_second"] for row in rows.values() if row["fits"])
    assert rows[plan["best"]]["tokens_per_second"] == fastest
    for row in rows.values():
        assert 0 < row["bubble_global"] < 1
        assert row["bytes"]["total"] == sum(
            size for name, size in row["bytes"].items() if name != "total"
        )
    # tokens/s cannot exceed what the devices' FLOPs allow: 6 N FLOPs a token, at most the peak.
    assert fastest < 1024 * 989e12 / (6 * 70e9)
    assert seconds < 20  # CPU time, however busy the machine is; 8 s on an idle one


def test_rows_are_in_the_units_that_people_publish(capsys):
    """By the definitions of `jaxpipe.training.step_metrics`; the configured row comes first."""
    words = [str(SMALL), "parallel.pp=2", "parallel.dp=2", "train.grad_accum_steps=8"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    config = configs.load(SMALL, words[1:])
    flops = config.model.flops_per_token(config.train.seq_len)
    for row in rows:
        speed = row["tokens_per_second_per_gpu"]
        assert row["step_seconds"] * speed * 4 == pytest.approx(config.tokens_per_step)
        assert row["tflops_per_gpu"] == pytest.approx(speed * flops / 1e12)
        assert row["mfu"] == pytest.approx(speed * flops / 989e12)
        assert row["gib"] * 2**30 == pytest.approx(row["bytes"]["total"])
    assert [row["configured"] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert main(words) == 0
    _, names, first, *_ = capsys.readouterr().out.split("\n")
    assert first.split()[:2] == ["1f1b", "*"]
    cells = dict(zip(names.split()[1:], first.split()[2:]))
    assert cells["s/step"] == f"{rows[0]['step_seconds']:.4g}"
    trillion = 1e12 / config.tokens_per_step * rows[0]["step_seconds"] / 86400
    assert cells["days/T"] == f"{trillion:,.3g}"


def test_a_plan_fills_92_percent_of_what_jax_allocates(capsys):
    def fits(*words):
        assert main([str(SMALL), "--json", *words]) == 0
        rows = json.loads(capsys.readouterr().out)["schedules"]
        one = next(row for row in rows if row["configured"])
        return one["fits"], one["bytes"]["total"]

    needed = fits()[1]
    for share, want in ((1.15, False), (1.2, True)):  # of 1 / 0.92 / 0.92
        assert fits("--memory", f"{needed * share / 1000:.0f}kB")[0] == want


@pytest.mark.extended
def test_the_command_prints_draws_and_advises(capsys, tmp_path):
    small = [str(SMALL), "parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=4"]
    picture = tmp_path / "plan.svg"
    arguments = ["--show", "1f1b", "--timeline", "--picture", str(picture)]
    assert main([*small, *arguments]) == 0
    out = capsys.readouterr().out
    assert "zb_auto 2p" in out
    assert "rank 1 | " in out
    assert picture.read_text().startswith("<?xml")
    assert main([*small, "--bubble", "0.1", "--schedules", "gpipe"]) == 0
    assert "train.grad_accum_steps=" in capsys.readouterr().out


def test_a_bubble_out_of_reach_is_not_sought_with_ever_more_microbatches():
    config, one = estimate_of("parallel.pp=2", "parallel.dp=1")
    (sentence,) = advise(config, [one], memory=80e9, bubble=1e-3).sentences
    assert "not even train.grad_accum_steps=128 brings the bubble below 0.1%" in sentence


@pytest.mark.slow
def test_it_says_what_overlapping_steps_would_save(capsys):
    small = [str(SMALL), "parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=4",
             "parallel.transfer_ticks=1", "parallel.vocab_parallel_pp=false"]  # fmt: skip
    several = [*small, "--fused-steps", "3"]
    assert main([*several, "--json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)["schedules"]}
    assert 0 < rows["zb_h2"]["saved_by_overlap"] < 0.2
    assert rows["dualpipe"]["saved_by_overlap"] is None
    assert main([*several, "--show", "zb_h2", "--timeline"]) == 0
    out = capsys.readouterr().out
    assert "saved: share of the scan's time" in out
    assert "W11+U11" in out
    assert main([*several, "--show", "dualpipe", "--timeline"]) == 2
    assert "dualpipe has every stage on two ranks" in capsys.readouterr().err
    assert main([*small, "--show", "dualpipe"]) == 0
    assert "saved" not in capsys.readouterr().out


def test_replicas_fill_the_devices_that_are_planned_for(capsys):
    tokens = []
    for arguments in (["parallel.dp=3"], ["parallel.dp=-1", "--devices", "12"]):
        assert main([str(SMALL), "parallel.pp=4", *arguments, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        tokens.append({row["schedule"]: row["tokens_per_second"] for row in plan["schedules"]})
    assert tokens[0] == tokens[1]


def test_measured_seconds_replace_the_computed(capsys, tmp_path):
    costs = tmp_path / "ops.json"
    costs.write_text('{"seconds": {"layer": {"F": 1, "B": 1, "W": 1}, "head": 0, "transfer": 0}}')
    small = [str(SMALL), "parallel.pp=2", "parallel.dp=1", "model.n_layers=2",
             "train.grad_accum_steps=4", "parallel.layer_split=even", "--json"]  # fmt: skip
    assert main([*small, "--costs", str(costs)]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)["schedules"]}
    assert rows["1f1b"]["makespan"] == 3 * (4 + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "1f2b"], "--show '1f2b' is not in the table: use one of '1f1b', 'gpipe'"),
        (["--costs", "nowhere.json"], "cannot read op seconds from nowhere.json"),
        (["parallel.pp=64"], "parallel.pp=64 exceeds model.n_layers=4"),
        (["parallel.dp=-1"], "parallel.dp=-1: give at least 1; or -1 for all devices"),
        (["parallel.dp=-1", "--devices", "9"], "parallel.dp=-1 takes all 9 devices"),
        (["--devices", "4"], "must equal the number of devices, 4: change one of them.\n"),
        (["parallel.tp=3"], "must be a multiple of parallel.tp=3"),
        (["--picture", "plan.gif"], r"\.svg"),
        (["--picture", "nowhere/a.svg"], "--picture nowhere/a.svg cannot be written (No such file"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert main([str(SMALL), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message.replace("\\", "") in error


def test_sizes_in_words():
    assert parse_bytes("1.5GiB") == 1.5 * 2**30
    for wrong in ("many", "GiB", "1.2.3GB", "80Gi B"):
        with pytest.raises(Exception, match="is not a size such as 80GiB"):
            parse_bytes(wrong)
    assert parse_bytes("80B") == 80
    with pytest.raises(Exception, match="'80' has no unit"):
        parse_bytes("80")
