"""Steps over layers that sleep: every op sleeps as often and as long as it should."""

import json
import time
from collections import Counter
from dataclasses import asdict

import jax
import pytest

from jaxpipe import bench as bench
from jaxpipe.core.mesh import make_mesh
from jaxpipe.lab.bench import sleeping
from jaxpipe.lab.bench.clockwork import ClockworkSteps, table
from jaxpipe.lab.bench.sleeping import SleepingStep
from jaxpipe.lab.bench.worker import BenchWorker
from jaxpipe.schedules import ScheduleVariant

F, B, W = 0.004, 0.002, 0.001
RUN = ["clockwork", "--ranks", "2", "--seconds", "0.004", "0.002", "0.001", "--steps", "1"]


@pytest.mark.parametrize(
    "variant",
    [ScheduleVariant("1f1b", in_flight=3), ScheduleVariant("zb_h1"), ScheduleVariant("dualpipev")],
    ids=lambda one: one.label,
)
def test_every_op_sleeps_once_for_its_stage_and_microbatch(variant, monkeypatch):
    """The two ranks are two virtual devices here."""
    monkeypatch.setattr(
        sleeping, "make_mesh", lambda pp: make_mesh(pp=pp, devices=jax.devices()[:pp])
    )
    work, slept = SleepingStep(variant, 2, 4, F, B, W), []
    monkeypatch.setattr(time, "sleep", slept.append)
    worker = BenchWorker()
    worker.build_sleeping("step", asdict(work))
    part, times = 2 / work.schedule.stages, 4 * work.schedule.stages
    assert Counter(slept) == dict.fromkeys((F * part, B * part, W * part), times)
    assert sum(slept) == pytest.approx(2 * work.seconds)
    worker.step("step", asleep=False)
    assert sum(slept) == pytest.approx(2 * work.seconds)


@pytest.mark.extended
def test_processes_are_measured_beside_the_simulator(tmp_path, capsys):
    out = tmp_path / "clockwork.json"
    assert bench.main([*RUN, "--schedules", "zb_h1", "--rounds", "2", "--out", str(out)]) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    (steps,) = found["steps"]
    steps = ClockworkSteps(**steps)
    assert steps.useful == pytest.approx(4 * (F + B + W))
    assert steps.useful < steps.predicted
    assert steps.useful < steps.measured[0]
    assert f"| 2 | 4 | `zb_h1` | {steps.measured[0] / steps.predicted:.3f} |" in said
    assert table([steps]) in said
    assert found["versions"]["jax"] == jax.__version__


def test_neighbours_go_by_turns_where_that_is_shorter():
    """Sleeps then follow the clock of the scan in which a rank waits for one neighbour."""
    found = {
        name: SleepingStep(ScheduleVariant(name), 4, 16, F, B, W).lockstep
        for name in ("1f1b", "zbv")
    }
    assert (found["1f1b"].phases, found["1f1b"].synchronizes_all) == (2, False)
    assert (found["zbv"].phases, found["zbv"].synchronizes_all) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "--ranks 1 must be at least 2"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--seconds", "0.1", "0", "0.1"], "--seconds 0 must be above 0"),
        (["--schedules", "custom"], "--schedules custom: its orders are in a file"),
        (["--schedules", "magic"], "unknown schedule 'magic'"),
        (["--out", "nowhere/found.json"], "its folder is missing"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, capsys):
    assert bench.main(["clockwork", *arguments]) == 2
    assert said in capsys.readouterr().err
