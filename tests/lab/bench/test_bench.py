"""The measurement itself: predictions from known costs, refusals, tiny timers."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from commands import start

from jaxpipe import bench as bench
from jaxpipe import config as configs
from jaxpipe.lab.bench import ops, processes, step, worker
from jaxpipe.lab.bench.results import MeasuredStep
from jaxpipe.lab.bench.variants import (
    DEFAULT,
    data_parallel_config,
    predict_seconds,
    schedule_config,
    single_config,
)
from jaxpipe.planning import (
    Devices,
    LayerSeconds,
    OpSeconds,
    arrange_variant,
    estimate,
    op_seconds,
)
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.run.measure.op_timers import OpTimer
from jaxpipe.run.measure.step_timers import UpdateTimer
from jaxpipe.schedules import ScheduleVariant
from jaxpipe.training.trainer import Trainer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
SMALL = Path(__file__).parents[2] / "data" / "small.toml"
SECONDS = OpSeconds(
    LayerSeconds(F=1, B=1, W=1, BW=2), head=0.5, embed=0.25, embed_gradient=0.125, transfer=0.0625
)


def small(*overrides):
    plain = ["parallel.pp=1", "parallel.dp=1", "optimizer.clip_norm=0", "optimizer.warmup_steps=0"]
    return configs.load(SMALL, [*plain, *overrides])


def test_known_costs_give_the_seconds_computed_by_hand():
    """1F1B, P = 2, M = 2, a layer a stage; a tick is as long as its slowest cell.

    rank 0: F0    F1    .   B0     .    B1       F: 1 + embed, B: 2 + embed_gradient
    rank 1: .     F0    B0  F1     B1   .        F: 1 + head,  B: 2
    """
    config = schedule_config(small("model.n_layers=2"), "1f1b", 2)
    ticks = 1.25 + 1.5 + 2 + 2.125 + 2 + 2.125
    assert predict_seconds(config, SECONDS) == ticks + 5 * 0.0625


def test_the_unsplit_backward_is_the_measured_one():
    found = SECONDS.costs((3, 3), split=False)
    assert [b + w for b, w in zip(found.B, found.W)] == [6.125, 6]
    assert list(found.F) == [3.25, 3.5]
    without = OpSeconds(LayerSeconds(F=1, B=1, W=2), head=0, transfer=0).costs((1,), split=False)
    assert without.B[0] + without.W[0] == 3


def test_ranks_that_share_the_ends_pay_alike():
    """Each of two ranks with two stages has a share of embedding and head, and four exchanges."""
    found = SECONDS.costs((2, 2, 2, 2), shared_by=2)
    assert set(found.F) == {2 + ((0.5 + 0.25 + 0.125) / 2 + 4 * 0.0625) / 2}
    assert (set(found.B), set(found.W)) == ({2}, {2})


@pytest.mark.parametrize("name", [*DEFAULT, "interleaved_1f1b:v=4,in_flight=10,vocab_parallel"])
def test_every_schedule_can_be_built(name):
    config = schedule_config(small("model.n_layers=8"), name, 8)
    assert predict_seconds(config, SECONDS) > 8 * 8 * 3 / 2


@pytest.mark.slow
def test_timers_give_every_op_a_positive_time():
    trainer = Trainer.resolve(small(), tuple(jax.devices()[:1]))
    seconds = OpTimer(trainer, layers=2).seconds()
    complete = msgspec.convert(seconds | {"transfer": 1.0}, OpSeconds)
    assert min(seconds["layer"].values()) > 0
    assert min(complete.head, complete.embed, complete.embed_gradient, complete.layer.BW) > 0
    timer = UpdateTimer(trainer, 2)
    assert timer.seconds() > 0
    model = trainer.config.model
    ends = msgspec.structs.replace(model, n_layers=0).parameter_count()
    two = msgspec.structs.replace(model, n_layers=2).parameter_count()
    assert timer.share_of_layers == (two - ends) / two


@pytest.mark.extended
def test_an_update_of_layers_of_two_kinds_is_timed():
    """A dense and a sparse layer, and no more layers than the model has."""
    path = Path(__file__).parents[3] / "configs/quickstart_moe.toml"
    one = ["model.n_layers=2", "parallel.pp=1", "parallel.dp=1", "parallel.ep=1"]
    trainer = Trainer.resolve(configs.load(path, one), tuple(jax.devices()[:1]))
    timer = UpdateTimer(trainer, 3)
    assert timer.layers == 2
    assert timer.seconds() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained", "accumulated"])
def test_a_worker_trains_as_the_trainer_does(kind):
    """A step of either kind and the data-parallel step give equal losses."""
    mine = worker.BenchWorker()
    found = mine.build("one", kind, msgspec.to_builtins(single_config(small(), 4)))["losses"]
    double = msgspec.to_builtins(data_parallel_config(small(), 4))
    np.testing.assert_allclose(mine.build("two", "trained", double)["losses"], found, rtol=1e-6)
    assert found[1] < found[0]
    assert mine.step("one")["loss"] < found[1]
    mine.drop("one")
    assert list(mine.steps) == ["two"]


def test_exported_values_are_the_trainers(tmp_path):
    config = single_config(small(), 4)
    worker.BenchWorker().export(str(tmp_path / "values.npz"), msgspec.to_builtins(config))
    with np.load(tmp_path / "values.npz") as file:
        values = dict(file)
    params = Trainer.resolve(config, tuple(jax.devices()[:1])).init().params
    np.testing.assert_array_equal(values["layers/1/attn/wq"], params["layers"][1]["attn"]["wq"][0])
    np.testing.assert_array_equal(values["embed_head/head"], params["embed_head"]["head"])
    assert values["inputs"].shape == (4, 1, 32)


def test_predictions_come_from_the_ops_on_both_sides_of_a_step():
    config = schedule_config(small("model.n_layers=8"), "gpipe", 8)
    measured_ops = msgspec.to_builtins(SECONDS)
    for computed in ("copies", "again"):
        del measured_ops[computed]
    before, after = ({**measured_ops, "update": each} for each in (1.0, 3.0))
    alone = predict_seconds(config, SECONDS)
    assert step.predict(config, before, after) == pytest.approx(alone + 2)


def test_losses_of_another_model_stop_the_bench():
    step._check_losses("torch", [5.0, 4.0], [5.0001, 4.0001])
    with pytest.raises(step.BenchError, match="torch: its losses"):
        step._check_losses("torch", [5.0, 4.0], [5.0, 4.001])


@pytest.mark.slow
def test_ops_write_what_plans_read(tmp_path, capsys):
    out = tmp_path / "ops.json"
    overrides = ["parallel.pp=2", "parallel.dp=1", "parallel.tp=2"]
    assert bench.main(["ops", str(SMALL), *overrides, "--repeats", "1", "--out", str(out)]) == 0
    assert "TFLOP/s" in capsys.readouterr().out
    found = json.loads(out.read_text())
    read = op_seconds(configs.load(SMALL, [*overrides, f"parallel.costs={out}"]))
    assert read.layer.F == found["seconds"]["layer"]["F"] > 0
    assert found["flops"]["BW"] == found["flops"]["B"] + found["flops"]["W"]
    assert read.costs((2, 2)).F[1] == 2 * read.layer.F + read.head


@pytest.mark.slow
def test_ops_of_devices_that_share_layers_and_packed_sequences_in_slices():
    """On four devices at once, with a message to four others."""
    how = ("parallel.dp=2", "parallel.cp=2", "parallel.tp=2", "parallel.slices=2")
    config = small(*how, "parallel.sequence_parallel=true", "data.packing=best_fit")
    found = ops.measure(config, 1, 1, 1.0)
    complete = msgspec.convert(found["seconds"], OpSeconds)
    assert min(complete.layer.F, complete.layer.B, complete.layer.W, complete.layer.BW) > 0
    assert min(complete.head, complete.embed, complete.embed_gradient, complete.transfer) > 0
    assert found["transfer_measured"]
    assert found["flops"]["F"] == costs_of(config).kinds["layer"].F


def test_ops_without_the_devices_that_they_need():
    part = ops.reduce_to_one_rank(small("parallel.tp=2"), 1)
    assert (part.parallel.tp, part.model.n_heads) == (1, 2)
    with pytest.raises(configs.ConfigError, match="there are 2: time ops on as many, or with"):
        ops.reduce_to_one_rank(small("parallel.dp=2", "parallel.cp=2", "parallel.tp=2"), 2)


@pytest.mark.versions
def test_steps_on_the_present_devices(tmp_path, capsys):
    out = tmp_path / "steps.json"
    assert bench.main(["train", str(SMALL), "--steps", "2", "--out", str(out)]) == 0
    assert "tokens_per_second_per_device" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["devices"] == 8
    assert found["command"] == f"python -m jaxpipe.bench train {SMALL} --steps 2 --out {out}"
    assert found["least_seconds"] <= found["step_seconds"] <= found["most_seconds"]
    rate = 4 * 2 * 32 / found["step_seconds"] / 8
    assert found["tokens_per_second_per_device"] == pytest.approx(rate)


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="a rank is pinned to a core of its own, on Linux")
def test_steps_take_turns_and_are_written(tmp_path):
    out, names = tmp_path / "steps.json", ["single", "data parallel", "gpipe"]
    config = [str(SMALL), "model.n_layers=2", "parallel.pp=1", "parallel.dp=1"]
    how = ["--schedules", "gpipe", "--microbatches", "2", "--rounds", "1", "--patience", "0"]
    command = [sys.executable, "-m", "jaxpipe.bench", "step", *config, *how, "--out", str(out)]
    output, _ = (process := start(command)).communicate()
    assert process.returncode == 0, output
    steps = msgspec.convert(json.loads(out.read_text())["steps"], list[MeasuredStep], strict=False)
    assert [one.label for one in steps] == [f"jaxpipe {name}" for name in names]
    assert all(first > second > 0 for first, second in (one.losses for one in steps))
    assert "round 1 of M=2 done" in output


def test_a_step_beside_other_work_is_run_again(monkeypatch):
    others, takes, tried = [0.0], iter([9.0, 0.0, 9.0, 9.0, 9.0]), []
    monkeypatch.setattr(time, "process_time", lambda: 0.0)  # threads of this process are busy, too
    monkeypatch.setattr(processes, "machine_busy_seconds", lambda: others[0])

    def turn():
        tried.append(next(takes))
        others[0] += tried[-1]
        return len(tried)

    assert processes.run_undisturbed((), "soon", turn, patience=0) == 2
    assert processes.run_undisturbed((), "never", turn, patience=0) is None
    assert len(tried) == 5


def test_a_device_of_a_tp_group_has_its_part_of_the_model():
    part = ops.reduce_to_one_device(configs.load(SMALL, ["parallel.tp=2", "parallel.pp=2"]))
    assert (part.model.n_heads, part.model.n_kv_heads, part.model.head_size) == (2, 1, 8)
    assert (part.model.d_ff, part.model.vocab_size, part.parallel.tp) == (32, 128, 1)


def test_the_published_comparison_of_schedules_is_reproduced():
    """torchtitan, December 2024, table 5: 128 tokens/s under interleaved 1F1B, 100 under 1F1B."""
    path = SMALL.parents[2] / "configs" / "llama3_1_405b_512gpu.toml"
    own_ends = ["parallel.transfer_ticks=1", "parallel.vocab_parallel_pp=false"]
    config = configs.load(path, own_ends)
    seconds = op_seconds(config)
    plain, interleaved = (
        estimate(arrange_variant(config, Devices(), variant, seconds), seconds)
        for variant in (
            ScheduleVariant("1f1b"),
            ScheduleVariant("interleaved_1f1b", virtual_stages=2),
        )
    )
    assert plain.report.makespan / interleaved.report.makespan == pytest.approx(1.28, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--schedules", "zbx"], "unknown schedule 'zbx'"),
        (["--schedules", "1f1b:w=2"], "--schedules 1f1b:w=2: write v=N"),
        (["--schedules", "dualpipe", "--microbatches", "2"], "dualpipe needs"),
        (["--microbatches", "3"], "--microbatches 3 must be even"),
        (["model.n_layers=3"], "model.n_layers=3 must be a multiple of the 2 stages"),
        (
            ["model.n_layers=6", "--schedules", "zbv", "--torch", sys.executable],
            "model.n_layers=6 must be a multiple of the 4 stages",
        ),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--rounds", "1", "train.steps=x"], "train.steps: expected `int`"),
        (["--torch", "/nowhere/python"], "cannot be started"),
        (["--out", "/nowhere/results.json"], "cannot be written"),
    ],
)
def test_bad_input_to_the_bench_is_one_sentence(arguments, sentence, capsys):
    assert bench.main(["step", str(SMALL), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1
