"""`bench report`: the results it keeps when cut off, its table, and its parsed commands."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe import bench as command
from jaxpipe import config as configs
from jaxpipe.lab.bench import correct, report
from jaxpipe.lab.bench.items import MODEL, Item, list_items
from jaxpipe.lab.bench.options import check_out

ROOT = Path(__file__).parents[3]
STEP = {
    "step_seconds": 2.0, "compile_seconds": 9.0, "precision": "fp8", "remat": "full", "mfu": 0.5,
    "tokens_per_second_per_device": 1234.0, "flops_per_second_per_device": 5e14,
    "peak_memory_bytes": 2**34,
}  # fmt: skip
# Commands instead of measurements: one writes given results, one never ends.
COMMANDS = {
    "writes": f"import json, sys; open(sys.argv[2], 'w').write(json.dumps({STEP}))",
    "fails": "print('ValueError: it is broken\\n  as follows'); raise SystemExit(3)",
    "hangs": (
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "print('started', flush=True); time.sleep(600)"
    ),
}
DRIVER = """
import sys
from jaxpipe import bench
from jaxpipe.lab.bench import report
from jaxpipe.lab.bench.items import Item
report.list_items = lambda cpu: tuple(Item(n, "to see", (n,), 500) for n in ("writes", "hangs"))
sys.exit(bench.main(["report", "--cpu", "--out", sys.argv[1]]))
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    for name, code in COMMANDS.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def test_every_item_has_its_outcome_and_a_finished_one_is_not_run_again(
    commands, monkeypatch, capsys
):
    out = commands / "report.json"
    every = [
        Item("one", "to see", ("writes",), 60), Item("two", "to see", ("fails",), 60),
        Item("three", "to see", ("hangs",), 1, writes=False),
    ]  # fmt: skip
    monkeypatch.setattr(report, "list_items", lambda cpu: every)
    words = ["report", "--cpu", "--out", str(out)]
    assert command.main(words) == 0
    found = json.loads(out.read_text())
    assert found["items"]["one"]["found"] == STEP
    assert found["items"]["two"]["error"] == "exit 3: ValueError: it is broken as follows"
    assert found["items"]["three"]["error"] == "ended after its limit of 1 s"
    assert found["items"]["three"]["found"] == {"said": "started"}
    assert found["versions"]["jax"]
    assert found["command"] == f"python -m jaxpipe.bench report --cpu --out {out}"
    said = capsys.readouterr().out
    assert "| one | fp8 | full | 1,234 | 500 | 50.0% | 16.0 |" in said
    assert "| two | 0 | exit 3: ValueError: it is broken as follows |" in said
    every[1] = Item("two", "to see", ("writes",), 60)
    (commands / "writes.py").write_text(COMMANDS["writes"].replace("1234.0", "4321.0"))
    assert command.main([*words, "--items", "one", "two"]) == 0
    again = json.loads(out.read_text())["items"]
    assert again["one"] == found["items"]["one"]  # failed items are run again
    assert again["two"]["found"]["tokens_per_second_per_device"] == 4321.0
    assert command.main([*words[:-1], str(commands / "late.json"), "--minutes", "0"]) == 0
    assert json.loads((commands / "late.json").read_text())["items"] == {}


@pytest.mark.extended
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_cut_off_has_kept_what_it_found(commands, ends):
    out = commands / "report.json"
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        for _ in range(600):
            if out.is_file() and json.loads(out.read_text())["running"] == "hangs":
                break
            time.sleep(0.1)
        process.send_signal(ends)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        for pid in commands.glob("pid"):
            with suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
    found = json.loads(out.read_text())
    assert found["items"]["writes"]["found"] == STEP
    assert found["running"] == "hangs"
    if ends == signal.SIGTERM:
        assert process.returncode == 1
        assert b"has what was found" in errors
        assert b"| writes | 0 |" in output
        assert b"Cut off in `hangs`." in output
        assert found["items"]["hangs"]["error"] == "cut off"


@pytest.mark.extended
@pytest.mark.parametrize("cpu", [False, True], ids=["gpu", "cpu"])
def test_the_commands_of_a_report_can_be_read(cpu):
    every = list_items(cpu=cpu)
    assert len({item.name for item in every}) == len(every)
    for item in every:
        if item.words[0] == "jaxpipe.bench":
            _, _, path, *words = item.words
            overrides = [word for word in words if "=" in word]
            config = configs.load(ROOT / path, overrides)
            resolved(config)
            assert config.runtime.cpu_devices == (cpu and config.parallel.pp)
            assert config.train.seq_len == (64 if cpu else 16384 if item.name == "long" else 4096)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "report.json", "--items", "ops", "rest"], "--items rest: use some of correct"),
        (["--out", "none/report.json"], "its folder is missing"),
        (["--out", "report.json"], "nvidia-smi finds no GPU"),
    ],
)
def test_bad_input_is_one_sentence(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert command.main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(configs.ConfigError, match="its folder is missing or read-only"):
        check_out(Path("report.json"))


def test_each_kind_of_finding_has_its_words():
    layer = {"F": 1e-3, "B": 2e-3}
    found = {"seconds": {"layer": layer}, "peak": 1e12, "flops": {"F": 5e8, "B": 5e8}}
    assert report._summarise(found) == "F 1 ms (50% of the peak), B 2 ms (25% of the peak)"
    assert report._summarise(found | {"peak": None}) == "F 1 ms, B 2 ms"
    assert report._summarise({"errors": {"fp8": {"F": 0.5}}}) == "fp8 off by F 0.5"
    assert report._summarise(STEP) == "2 s a step, compiled in 9 s"
    assert report._summarise({}) == ""


TINY = (
    "model.preset=", "model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1", "model.d_ff=64",
    "model.vocab_size=64", "model.attention=xla", "train.seq_len=32", "train.loss_chunks=1",
)  # fmt: skip


@pytest.mark.slow
def test_what_f_b_and_w_are_off_by(tmp_path, monkeypatch, capsys):
    out = tmp_path / "correct.json"
    words = ["correct", str(ROOT / MODEL), *TINY, "--layers", "1", "--out", str(out)]
    assert command.main(words) == 0
    found = json.loads(out.read_text())
    errors, limits = found["errors"], found["limits"]
    for name in ("bfloat16", "fp8"):
        assert all(0 < errors[name][op] < limits[name][op] for op in "FBW")
    assert min(errors["fp8"].values()) > max(errors["bfloat16"]["F"], 2**-9)
    for wrong in ({"F": 2.0, "B": 0.0, "W": 0.0}, {"F": 0.0, "B": 0.0, "W": float("nan")}):
        off = {"device": "", "errors": {"fp8": wrong}, "limits": {"fp8": limits["fp8"]}}
        monkeypatch.setattr(correct, "measure", lambda *_, off=off: off)
        assert command.main(words) == 1
        assert "in fp8" in capsys.readouterr().err
