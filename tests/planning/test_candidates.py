"""The rows of a plan, which of them is the run's own schedule, and the cost of messages."""

import json
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import pytest
from legal import QUICK
from signature import signature

from jaxpipe import config as configs
from jaxpipe.core.schedule import Lockstep, ScheduleError, write_schedule
from jaxpipe.plan import main
from jaxpipe.planning import (
    Devices,
    Hardware,
    analytic,
    arrange,
    arrange_variant,
    estimate,
    estimates,
    resolve,
)
from jaxpipe.planning.cost.parameter_traffic import mirrored_bytes
from jaxpipe.schedules import ScheduleVariant, build
from jaxpipe.training.trainer import Trainer

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SIZES = ("parallel.pp=2", "parallel.dp=1", "model.n_layers=8", "train.grad_accum_steps=8")
OWN = {
    "1f1b": [],
    "1f1b in_flight=5": ["parallel.in_flight=5"],
    "1f1b in_flight=3": ["parallel.in_flight=3", "parallel.transfer_ticks=1"],
    "interleaved_1f1b v=2": ["parallel.schedule=interleaved_1f1b"],
    "interleaved_zb v=4": ["parallel.schedule=interleaved_zb", "parallel.virtual_stages=4"],
    "zb_auto 3.0": ["parallel.schedule=zb_auto", "parallel.memory_limit=3"],
    "zbv": ["parallel.schedule=zbv", "parallel.objective=scan"],
    "dualpipe": ["parallel.schedule=dualpipe", "parallel.layer_split=[3,5]"],
    "zb_h1": ["parallel.schedule=zb_h1", "parallel.defer_embed_head=true"],
}


@pytest.fixture(autouse=True)
def _quick_searches(monkeypatch):
    for module in ("candidates", "resolve"):
        monkeypatch.setattr(import_module(f"jaxpipe.planning.{module}"), "QUICK", QUICK)


def candidates(config):
    found, _ = estimates(config, analytic(config, Hardware()))
    return found


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("label", OWN)
def test_one_candidate_is_the_runs_own(label, on_cpu):
    """On virtual CPU devices of the configuration, and compiled for GPUs that are not present.

    Its tables are those that run.
    """
    config = configs.load(SMALL, [*SIZES, *OWN[label], f"runtime.cpu_devices={2 * on_cpu}"])
    rows = candidates(config)
    assert len({row.label for row in rows}) == len(rows)
    (own,) = (row for row in rows if row.configured)
    assert (own, own.label) == (rows[0], label)
    assert own.plan == arrange(config)
    planned = own.plan.tables
    if on_cpu:
        run = Trainer.resolve(config, tuple(jax.devices()[:2])).pipeline.tables
    else:
        run = arrange(config, Devices()).tables
    assert signature(planned) == signature(run)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (planned.columns, run.columns))))


def test_a_search_for_the_scan_knows_the_ticks_of_a_transfer():
    how = ["parallel.schedule=zbv", "parallel.objective=scan", "parallel.pp=4", *SIZES[2:]]
    config = configs.load(SMALL, ["parallel.dp=1", *how])
    costs = analytic(config, Hardware()).costs((1,) * 8)
    how = {"costs": costs, "objective": "scan", "effort": QUICK}
    searched = {
        ticks: build(
            "zbv", pp=4, microbatches=8, lockstep=Lockstep(ticks, synchronizes_all=meets), **how
        )
        for ticks, meets in ((1, True), (2, False))
    }
    assert searched[1] != searched[2]
    assert arrange(config, Devices("cpu"), effort=QUICK).schedule == searched[1]
    assert arrange(config, Devices(), effort=QUICK).schedule == searched[2]


@pytest.mark.parametrize("label", ["1f1b in_flight=5", "interleaved_1f1b v=2"])
def test_its_row_is_marked(label, capsys):
    overrides = [*SIZES, *OWN[label]]
    assert main([str(SMALL), *overrides]) == 0
    table, _, _ = capsys.readouterr().out.partition("\nschedule: ")  # the legend
    marked = [line for line in table.splitlines() if " * " in line]
    assert [line.split(" *")[0].strip() for line in marked] == [label]
    assert main([str(SMALL), *overrides, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert [row["schedule"] for row in rows if row["configured"]] == [label]


def test_a_schedule_of_a_file_is_marked_too(tmp_path):
    write_schedule(build("bfs", pp=2, microbatches=8), tmp_path / "mine.csv")
    how = ["parallel.schedule=custom", f"parallel.schedule_file={tmp_path / 'mine.csv'}"]
    config = configs.load(SMALL, [*SIZES, *how])
    (own,) = (row for row in candidates(config) if row.configured)
    assert (own.label, own.plan) == ("custom", arrange(config))


WRITTEN = ("1f1b in_flight=5", "interleaved_zb v=4", "zb_auto 3.0", "dualpipe")


@pytest.mark.parametrize("label", [*WRITTEN, "1f1b"])
def test_what_is_written_runs_as_it_was_planned(label, tmp_path, capsys):
    """With the settings that the command prints, instead of the configured schedule."""
    file = tmp_path / "orders.csv"
    how = [*SIZES, *(OWN[label] or ["parallel.slices=2"])]
    assert main([str(SMALL), *how, "--show", label, "--write", str(file)]) == 0
    said = capsys.readouterr().err.partition("to run it: ")[2].split()
    planned, written = configs.load(SMALL, how), configs.load(SMALL, [*how, *said])
    assert (written.parallel.schedule, written.parallel.schedule_file) == ("custom", str(file))
    wanted, got = arrange(planned).tables, arrange(written).tables
    assert all(map(np.array_equal, *map(jax.tree.leaves, (wanted.columns, got.columns))))


LOOP = ("model.n_layers=16", "parallel.unroll_layers=1", "train.offload_layers=1")


@pytest.mark.parametrize(
    ("schedule", "more", "possible"),
    [("1f1b", (), True), ("zbv", (), False), ("1f1b", LOOP, False)],
)
def test_a_schedule_that_train_refuses_is_named(schedule, more, possible, capsys):
    """Beside the others, which are possible."""
    assert main([str(SMALL), f"parallel.schedule={schedule}", "parallel.pp=4", *more]) == 0
    out = capsys.readouterr().out
    named = f"parallel.schedule='{schedule}', which the configuration names, is not possible"
    assert (named not in out) == possible
    assert ("makes a loop of 4 layers" in out) == bool(more)


@pytest.mark.parametrize(
    ("label", "own", "printed"),
    [
        ("interleaved_1f1b v=2", ["parallel.layer_split=[5,3]"], "parallel.layer_split=even"),
        ("1f1b", ["parallel.layer_split=balanced"], "parallel.layer_split=[4,4]"),
        (
            "gpipe",
            [*OWN["zb_auto 3.0"][:1], "parallel.memory_limit=1p"],
            "parallel.memory_limit=''",
        ),
    ],
)
def test_what_another_schedule_changes_is_printed(label, own, printed, tmp_path, capsys):
    how = [*SIZES, *own]
    words = [str(SMALL), *how, "--show", label, "--write", str(tmp_path / "orders.csv")]
    assert main(words) == 0
    settings = capsys.readouterr().err.partition("to run it: ")[2].split()
    assert printed in settings
    resolve(configs.load(SMALL, [*how, *settings]))


def test_a_loop_of_one_schedule_does_not_exclude_others(tmp_path, capsys):
    """DualPipe pairs layers, which a loop of `parallel.unroll_layers` cannot."""
    file, how = tmp_path / "orders.csv", [*SIZES, "parallel.unroll_layers=1"]
    words = [str(SMALL), *how, "--device", "h100", "--show", "dualpipev", "--write", str(file)]
    assert main(words) == 0
    said = capsys.readouterr().err.partition("to run it: ")[2].split()
    assert "parallel.unroll_layers=0" in said
    resolve(configs.load(SMALL, [*how, *said]))


def test_schedules_whose_steps_cannot_overlap_are_no_candidates():
    config = configs.load(SMALL, [*SIZES, "train.fused_steps=2", "train.spike_sigma=6"])
    seconds, devices = analytic(config, Hardware()), Devices.planned(config)
    arrange_variant(config, devices, ScheduleVariant("dualpipe"), seconds)
    with pytest.raises(ScheduleError, match="spike_sigma=6.0: ranks update before"):
        arrange_variant(config, devices, ScheduleVariant("zb_h1"), seconds)


@pytest.mark.parametrize(
    ("file", "message"),
    [("orders.txt", "a name that ends in .csv or .json"), ("no/orders.csv", "cannot be written")],
)
def test_files_that_cannot_be_written(file, message, tmp_path, capsys):
    assert main([str(SMALL), *SIZES, "--write", str(tmp_path / file)]) == 2
    assert message in capsys.readouterr().err


def test_what_a_sequence_parallel_run_sends():
    """Messages are sharded over tp, which divides their time; a second copy of a stage is not."""
    plans = {}
    for sequence in ("false", "true"):
        config = configs.load(
            SMALL, [*SIZES, "parallel.tp=2", f"parallel.sequence_parallel={sequence}"]
        )
        seconds = analytic(config, Hardware(link=1e12))
        one, both = (
            estimate(arrange_variant(config, Devices(), ScheduleVariant(name), seconds), seconds)
            for name in ("1f1b", "dualpipe")
        )
        assert both.mirroring == pytest.approx(mirrored_bytes(config, both.plan.layout) / 0.85e12)
        plans[sequence] = seconds.transfer, one.sent / one.plan.tables.ticks, both.mirroring
    whole, cut = plans["false"], plans["true"]
    assert (cut[0], cut[1]) == (whole[0] / 2, whole[1] / 2)
    assert cut[2] == whole[2] > 0
