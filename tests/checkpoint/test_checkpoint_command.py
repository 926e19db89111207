"""`python -m jaxpipe.checkpoint`: its output, where it writes, and its exit codes."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from hf_models import LLAMA, QWEN3, random_tensors, write_model
from msgspec.structs import replace
from safetensors.numpy import load_file

import jaxpipe.checkpoint.__main__ as command
from jaxpipe import config as configs
from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import Config, TrainConfig


@pytest.fixture
def run_config(tmp_path):
    """Return the path of a configuration whose model is `LLAMA`."""
    train = TrainConfig(steps=1, grad_accum_steps=1, microbatch_size=1, seq_len=77)
    path = tmp_path / "run.toml"
    path.write_text(configs.to_toml(Config(model=LLAMA, train=train)))
    return path


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA))


def test_there_and_back(tmp_path, source, run_config, capsys):
    out = tmp_path / "checkpoints"
    assert command.main(["import", str(source), str(run_config), "--out", str(out)]) == 0
    assert (
        f"imported {LLAMA.parameter_count():,} parameters into {out}/0" in capsys.readouterr().out
    )
    assert list_steps(out) == [0]
    back = tmp_path / "back"
    assert command.main(["export", str(out), str(back)]) == 0  # its newest
    assert "parameters of step 0 to" in capsys.readouterr().out
    for name, tensor in load_file(back / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, random_tensors(LLAMA)[name])
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "model.safetensors"]
    assert '"max_position_embeddings": 77' in (back / "config.json").read_text()
    options = ["--dtype", "bfloat16", "--max-shard-size", "20KB", "--max-positions", "8192"]
    words = ["export", str(out / "0"), str(tmp_path / "b"), "--config", str(run_config), *options]
    assert command.main(words) == 0
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    text = (tmp_path / "b" / "config.json").read_text()
    assert '"max_position_embeddings": 8192' in text
    assert '"torch_dtype": "bfloat16"' in text


@pytest.mark.parametrize("last", ["--out", "model.d_ff=48"])
def test_overrides_may_stand_before_or_after_the_option(tmp_path, source, run_config, last):
    option, override = ["--out", str(tmp_path / "c")], ["model.d_ff=48"]
    run_config.write_text(run_config.read_text().replace("d_ff = 48", "d_ff = 50"))
    words = [*override, *option] if last == "--out" else [*option, *override]
    assert command.main(["import", str(source), str(run_config), *words]) == 0
    assert "d_ff = 48" in command.StoredCheckpoint(tmp_path / "c" / "0").meta["config"]


def test_without_out_it_goes_to_the_run(tmp_path, source, run_config):
    words = ["import", str(source), str(run_config), f"run.dir={tmp_path}/run"]
    assert command.main(words) == 0
    assert list_steps(tmp_path / "run" / "imported") == [0]


def test_inspect_shows_names_shapes_sizes_and_the_configuration(
    tmp_path, source, run_config, capsys
):
    out = tmp_path / "c"
    command.main(["import", str(source), str(run_config), "--out", str(out)])
    for place in (out, out / "0"):
        capsys.readouterr()
        assert command.main(["inspect", str(place)]) == 0
        shown = capsys.readouterr().out
        rows = [line.split() for line in shown.splitlines()]
        assert ["step", "0"] in rows
        assert ["layers", "3"] in rows
        assert ["layers/*/attn/wk", "32", "x", "16", "float32", "3", "6.0", "KiB"] in rows
        assert ["embed_head/embed", "64", "x", "32", "float32", "1", "8.0", "KiB"] in rows
        assert "none: parameters only" in shown
        assert str(source) in shown
        assert "seq_len = 77" in shown
        assert ["steps", "0"] in rows


def refusals(tmp_path, source, config, step):
    tied = write_model(tmp_path / "tied", QWEN3, random_tensors(QWEN3))
    other = tmp_path / "other.toml"
    train = TrainConfig(steps=1, grad_accum_steps=1, microbatch_size=1, seq_len=8)
    other.write_text(configs.to_toml(Config(model=replace(LLAMA, n_layers=1), train=train)))
    return {
        "differ: n_layers is 2 there and 3 here": ["import", tied, config],
        "holds checkpoints of steps [0] already": ["import", source, config, "--out", step.parent],
        "has no config.json": ["import", tmp_path, config],
        "cannot read the configuration": ["import", source, tmp_path / "none.toml"],
        "unknown key model.n_layer": ["import", source, config, "model.n_layer=3"],
        f"DIR={str(tmp_path / 'no')!r} holds no checkpoint": ["export", tmp_path / "no", "x"],
        f"DIR={str(tmp_path / 'a')!r} holds no checkpoint": ["inspect", tmp_path / "a"],
        "params/layers/1/attn/wk has shape (32, 16) there": [
            "export", step, tmp_path / "x", "--config", other
        ],
        "exists and is not an empty directory": ["export", step, source],
    }  # fmt: skip


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, source, run_config, capsys):
    command.main(["import", str(source), str(run_config), "--out", str(tmp_path / "c")])
    for message, words in refusals(tmp_path, source, run_config, tmp_path / "c" / "0").items():
        capsys.readouterr()
        assert command.main([str(word) for word in words]) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["import", "a"],
        ["import", "a", "b", "--ou"],
        ["export", "a", "b", "c=d"],
        ["export", "a", "b", "--max-shard-size", "5 bits"],
    ],
)
def test_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2
    assert "usage: python -m jaxpipe.checkpoint" in capsys.readouterr().err


@pytest.mark.extended
def test_data_that_is_damaged_is_said_to_be(tmp_path, source, run_config):
    command.main(["import", str(source), str(run_config), "--out", str(tmp_path / "c")])
    for path in (tmp_path / "c" / "0" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:64])
    words = ["export", str(tmp_path / "c" / "0"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.checkpoint", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "c/0 is damaged" in done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import jaxpipe.checkpoint.__main__ as command
from jaxpipe.checkpoint.hf.safetensors_directory import TensorFiles

read = TensorFiles.read

def read_until_killed(files, name):
    if name == "model.layers.2.mlp.up_proj.weight":
        print(*(str(path) for path in Path(sys.argv[-1]).rglob("*")))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return read(files, name)

TensorFiles.read = read_until_killed
command.main(sys.argv[1:])
"""


@pytest.mark.extended
def test_a_killed_import_leaves_nothing_that_looks_complete(tmp_path, source, run_config):
    out = tmp_path / "c"
    words = ["import", str(source), str(run_config), "--out", str(out)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert "/d/" in killed.stdout  # tensors were on disk already
    assert list_steps(out) == []
    assert command.main(words) == 0
    tensor = random_tensors(LLAMA)["model.layers.2.mlp.up_proj.weight"]
    [stored] = command.StoredCheckpoint(out / "0").read([("params", "layers", "2", "mlp", "w_up")])
    np.testing.assert_array_equal(stored, tensor.T)
