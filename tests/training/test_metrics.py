"""FLOPs, device peaks, the metrics log and the progress line."""

import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jaxpipe import optimizer as optimizers
from jaxpipe.config import LogConfig, load
from jaxpipe.data.batches import DocumentLengths
from jaxpipe.model import PRESETS
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.run.watch.progress import Progress, describe
from jaxpipe.runtime.devices import memory_peak, peak_flops
from jaxpipe.training.step_metrics import losses_of
from jaxpipe.training.trainer import Trainer


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4", 312e12),
        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GB200", 2500e12), ("NVIDIA A100X", None),
    ],
)  # fmt: skip
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


def test_rates_of_a_step():
    """Rates of the third step, after as many tokens of other steps, on eight devices."""
    config = load(SMALL)
    rates = Trainer.resolve(config).rates(3, (8 + 8) * 32, seconds=0.5)
    per_second = 8 * 32 / 0.5
    assert rates == {
        "lr": pytest.approx(1e-2),
        "tokens_seen": 16 * 32,
        "tokens_per_second": per_second,
        "tokens_per_second_per_device": per_second / 8,
        "tflops_per_device": per_second / 8 * config.model.flops_per_token(32) / 1e12,
        "step_seconds": 0.5,
    }


def test_gradients_of_frozen_weights_are_not_counted():
    """F and B of the matrices remain, 4 of 6 FLOPs of each number, and all of the attention."""
    trainer = Trainer.resolve(load(SMALL, ["lora.rank=2"]))
    model, rates = trainer.config.model, trainer.rates(1, 8 * 32, seconds=0.5)
    of_token = (
        model.flops_per_token(0) * 4 / 6 + model.flops_per_token(32) - model.flops_per_token(0)
    )
    assert rates["tflops_per_device"] == pytest.approx(8 * 32 / 0.5 / 8 * of_token / 1e12)


def test_rates_ask_no_device_that_has_a_step_to_do(monkeypatch):
    """The rate is computed on the host's CPU, whatever jax's default device is."""
    where = []

    def rate(*_):
        return lambda count: where.append(jax.config.jax_default_device) or 0.5

    monkeypatch.setattr(optimizers, "learning_rate", rate)
    with jax.default_device(jax.devices()[5]):
        assert Trainer.resolve(load(SMALL)).rates(3, 1, seconds=0.5)["lr"] == 0.5
    assert where == [jax.local_devices(backend="cpu")[0]]


def test_rates_of_packed_rows_count_no_padding_and_attention_by_document():
    """8 rows of 32 tokens, 200 of them not padding; half of these in documents of 25."""
    config = load(SMALL, ["data.packing=best_fit"])
    contents = DocumentLengths(8, 30, np.array([25] * 4 + [10] * 10))
    rates = Trainer.resolve(config).rates(3, 700, seconds=0.5, contents=contents)
    of_model = config.model.flops_per_token
    flops = 100 * of_model(25) + 100 * of_model(10)
    assert flops < 200 * of_model(32)
    assert rates["tokens_seen"] == 700
    assert rates["tokens_per_second"] == 400
    assert rates["tflops_per_device"] == pytest.approx(flops / 0.5 / 8 / 1e12, rel=1e-12)
    assert rates["padded_tokens"] == 8 * 32 - 200
    assert rates["packing_efficiency"] == 200 / 256
    line = describe(3, 4, VALUES | rates, None)
    assert "78.1% no padding" in line
    assert "padded_tokens" not in line


@pytest.mark.slow
def test_the_largest_loss_of_a_microbatch():
    """Of four, that with the least likely text, as a mean over its tokens."""
    trainer = Trainer.resolve(load(SMALL, ["parallel.pp=1", "parallel.dp=1"]), jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, 256, (4, 1, 32), np.int32)
    batch = {"inputs": tokens, "targets": tokens}
    state = trainer.init()
    shares = trainer.pipeline.losses(state.params, trainer.put(batch))
    _, metrics = trainer.train_step(state, trainer.put(batch))
    assert float(metrics["loss_max"]) == pytest.approx(4 * float(shares.max()), rel=1e-6)
    assert metrics["loss_max"] > metrics["loss"]


@pytest.mark.extended
def test_a_second_loss_of_the_head_is_logged_beside_the_loss():
    """It is trained on, but the loss and the held-out loss are the cross-entropy alone."""
    tokens = np.random.default_rng(0).integers(0, 256, (4, 1, 32), np.int32)
    batch, alone = {"inputs": tokens, "targets": tokens}, ["parallel.pp=1", "parallel.dp=1"]
    trainers = [
        Trainer.resolve(load(SMALL, [*alone, f"train.z_loss={z}"]), jax.devices()[:1])
        for z in (0, 0.5)
    ]
    (_, plain), (state, both) = (t.train_step(t.init(), t.put(batch)) for t in trainers)
    assert "z_loss" not in plain
    np.testing.assert_allclose(both["loss"], plain["loss"], rtol=1e-6)
    np.testing.assert_allclose(both["loss_max"], plain["loss_max"], rtol=1e-6)
    assert both["z_loss"] == pytest.approx(0.5 * np.log(256) ** 2, rel=0.02)  # of equal logits
    assert both["grad_norm"] > 1.1 * plain["grad_norm"]
    evaluated = [float(t.eval_step(state, t.put(batch))[0]) for t in trainers]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


def logging(directory, last_step=0):
    """Return a log with TensorBoard."""
    config = load(SMALL, [f"run.dir={directory}", "log.tensorboard=true"])
    return MetricsLog(directory, last_step=last_step, loggers=open_loggers(config, last_step))


def test_flops_of_a_window_are_those_of_its_keys():
    config = LlamaConfig(**PRESETS["mistral_7b_v0_1"])
    matrices = 7_241_732_096 - 32000 * 4096 - 65 * 4096
    assert config.flops_per_token(2048) == 6 * matrices + 12 * 32 * 4096 * 2048
    assert config.flops_per_token(32768) == 6 * matrices + 12 * 32 * 4096 * 4096


def write(directory, steps, last_step):
    with logging(directory, last_step) as log:
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


def test_event_files_are_read_in_the_order_of_starts_whatever_the_clock(tmp_path, monkeypatch):
    for clock in (2000, 1000, 3000):
        monkeypatch.setattr("jaxpipe.run.watch.tensorboard.time.time", lambda now=clock: now)
        write(tmp_path, [1], last_step=0)
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [int(name.split(".")[3]) for name in names] == [2000, 2001, 3000]


def test_numbers_that_json_lacks_are_null(tmp_path):
    with MetricsLog(tmp_path, last_step=0) as log:
        log.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]
    assert not (tmp_path / "tensorboard").exists()


def test_lists_are_lists_and_their_numbers_exact(tmp_path):
    many = list(range(100))
    values = {"counts": [[1, 2**31 - 1], [3, 4]], "share": [0.1, float("nan")], "many": many}
    with logging(tmp_path) as log:
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
    assert b"empty" not in content  # without values


VALUES = {
    "loss": 2.0, "target_tokens": 8, "grad_norm": 1.0, "lr": 1e-3, "step_seconds": 2.0, "mfu": 0.5,
}  # fmt: skip


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
    assert steps == ["2/4", "3/4", "4/4"]  # every second, and those with a held-out loss
    assert "eval_loss 1.5000" in text
    assert "ETA 0:00:04" in text
    assert "MFU 50.0%" in text
    assert "saved" in text


def test_a_line_has_the_numbers_that_layers_make_and_no_lists():
    line = describe(1, 2, VALUES | {"score": 0.25, "tokens": 96, "counts": [1, 2]}, None)
    assert line.endswith("2.000 s/step  score 0.25  tokens 96")


def test_the_line_has_a_smoothed_loss_and_not_all_that_is_logged():
    out = io.StringIO()
    logged_only = {"tokens_seen": 64, "data_seconds": 0.5, "loss_max": 3.0}
    with Progress(4, LogConfig(), Console(file=out, width=200)) as progress:
        for step, loss in enumerate([float("inf"), 2.0, 1.0, float("nan")], start=1):
            progress.update(step, VALUES | logged_only | {"loss": loss}, first=step == 1)
    lines = out.getvalue().splitlines()
    assert "smoothed" not in lines[0]
    assert "loss 1.0000  smoothed 1.9000  grad_norm" in lines[2]
    assert "smoothed 1.9000" in lines[3]
    assert not any(name in out.getvalue() for name in logged_only)


def test_a_message_is_printed_as_it_is(capsys):
    """A path may have brackets and colons, which rich reads as markup and emoji."""
    message = "saved in runs/[bold]a/:x:: bad [/data/a]"
    with Progress(1, LogConfig()) as progress:
        progress.say(message)
    assert capsys.readouterr().out == f"{message}\n"


def test_the_smoothed_loss_weighs_a_step_by_its_targets():
    """Losses 2, 5 and 3 a target, with 10, 0 and 30 targets; a step without targets has none."""
    out = io.StringIO()
    with Progress(3, LogConfig(), Console(file=out, width=200)) as progress:
        steps = [(2.0, 10), (float("nan"), 0), (3.0, 30)]
        for step, (loss, targets) in enumerate(steps, start=1):
            values = VALUES | {"loss": loss, "target_tokens": targets}
            progress.update(step, values, first=False)
    last = (0.9 * 2 * 10 + 0.1 * 3 * 30) / (0.9 * 10 + 0.1 * 30)
    lines = out.getvalue().splitlines()
    assert "smoothed 2.0000" in lines[1]
    assert f"smoothed {last:.4f}" in lines[2]


@pytest.mark.parametrize("count", [2**24 + 1, 10**15 + 1])
def test_a_count_is_exact_in_every_log(tmp_path, count):
    with logging(tmp_path) as log:
        log.write(1, {"tokens_seen": count, "share": 0.5})
    assert lines(tmp_path) == [{"step": 1, "tokens_seen": count, "share": 0.5}]
    (path,) = (tmp_path / "tensorboard").glob("events*")
    content, at, values = path.read_bytes(), 0, {}
    while at < len(content):  # records: length, its checksum, content, its checksum
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        values |= {value.tag: value for value in event.summary.value}
        at += 16 + length
    assert [int(number) for number in values["tokens_seen"].tensor.double_val] == [count]
    assert values["tokens_seen"].metadata.plugin_data.plugin_name == "scalars"
    assert values["share"].simple_value == 0.5


def test_a_live_line_on_a_terminal():
    text = shown(terminal=True)
    assert "step 4/4" in text
    assert "\x1b[?25h" in text  # the cursor is shown again
    assert shown(terminal=True, progress=False).count("\n") == 5


def test_events_do_not_import_torch(tmp_path):
    """A run's process would get CUDA libraries of another version."""
    (tmp_path / "torch.py").write_text("print('imported')")
    code = (
        f"from jaxpipe.config import load; from jaxpipe.run.watch.tensorboard import TensorBoard;"
        f"board = TensorBoard(load({str(SMALL)!r}, ['run.dir={tmp_path}']), 0);"
        f"board.show(1, {{'loss': 1.0}}); board.close(); print('shown'); import torch"
    )
    paths = f"{tmp_path}:{SMALL.parents[2]}"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.split() == ["shown", "imported"]


def test_the_largest_mean_of_a_microbatch():
    losses = losses_of(("loss",), jnp.array([0.5, 0.5]), jnp.array([0.125, 0.25]), None)
    assert losses["loss_max"] == 0.5 * 0.375 / 0.125
