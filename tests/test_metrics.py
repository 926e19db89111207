"""FLOPs, device peaks, the metrics log and the progress line."""

import io
import json

import pytest
from rich.console import Console

from jaxpipe.config import LogConfig
from jaxpipe.model import PRESETS
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.runtime.devices import memory_peak, peak_flops
from jaxpipe.training.metrics import MetricsLog
from jaxpipe.training.progress import Progress, describe


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4", 312e12)],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak


def test_an_unknown_device_has_no_peak():
    assert peak_flops("TPU v9") is None
    assert memory_peak() is None  # CPU


def test_flops_of_llama3_8b():
    """Matrices are all but the embedding (525,336,576) and the norm gains (65 x 4096)."""
    config = LlamaConfig(**PRESETS["llama3_8b"])
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert config.flops_per_token(4096) == 6 * matrices + 12 * 32 * 4096 * 4096


def test_flops_of_a_window_are_those_of_its_keys():
    config = LlamaConfig(**PRESETS["mistral_7b_v0_1"])
    matrices = 7_241_732_096 - 32000 * 4096 - 65 * 4096
    assert config.flops_per_token(2048) == 6 * matrices + 12 * 32 * 4096 * 2048
    assert config.flops_per_token(32768) == 6 * matrices + 12 * 32 * 4096 * 4096


def write(directory, steps, last_step):
    with MetricsLog(directory, tensorboard=True, last_step=last_step) as log:
        for step in steps:
            log.write(step, {"loss": float(step)})


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_each_step_stands_once_after_a_resume(tmp_path):
    write(tmp_path, range(1, 8), last_step=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    write(tmp_path, range(5, 7), last_step=4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_numbers_that_json_lacks_are_null(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False, last_step=0) as log:
        log.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]
    assert not (tmp_path / "tensorboard").exists()


def test_lists_are_lists_and_their_numbers_exact(tmp_path):
    many = list(range(100))
    values = {"counts": [[1, 2**31 - 1], [3, 4]], "share": [0.1, float("nan")], "many": many}
    with MetricsLog(tmp_path, tensorboard=True, last_step=0) as log:
        log.write(1, values | {"empty": [float("nan")] * 100})
    (line,) = lines(tmp_path)
    assert line["counts"] == values["counts"]
    assert line["share"] == [0.1, None]
    assert line["many"] == many
    (events,) = (tmp_path / "tensorboard").glob("events*")
    content = events.read_bytes()
    for tag in (b"counts/0/1", b"counts/1/1", b"share/0", b"many"):
        assert tag in content
    assert b"many/" not in content  # one histogram
    assert b"empty" not in content  # of nothing


VALUES = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "step_seconds": 2.0, "mfu": 0.5}


def shown(terminal, every=1, **config):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with Progress(4, LogConfig(every=every, **config), console) as progress:
        for step in range(1, 5):
            values = VALUES | ({"eval_loss": 1.5} if step == 3 else {})
            progress.update(step, values, first=step == 1)
        progress.say("saved")
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    text = shown(terminal=False, every=2)
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("step")]
    assert steps == ["2/4", "3/4", "4/4"]  # every second, and where held-out loss was taken
    assert "eval_loss 1.5000" in text
    assert "ETA 0:00:04" in text
    assert "MFU 50.0%" in text
    assert "saved" in text


def test_a_line_has_the_numbers_that_layers_make_and_no_lists():
    line = describe(1, 2, VALUES | {"score": 0.25, "tokens": 96, "counts": [1, 2]}, None)
    assert line.endswith("2.000 s/step  score 0.25  tokens 96")


def test_a_live_line_on_a_terminal():
    text = shown(terminal=True)
    assert "step 4/4" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert shown(terminal=True, progress=False).count("\n") == 5
