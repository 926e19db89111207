"""`python -m jaxpipe.plan`: its rows and units, its options and its refusals."""

import json
import time
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.config.units import parse_bytes
from jaxpipe.plan import main

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
CONFIGS = Path(__file__).parents[2] / "configs"


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
        (["parallel.pp=64"], "parallel.pp=64 is too much for model.n_layers=4"),
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
