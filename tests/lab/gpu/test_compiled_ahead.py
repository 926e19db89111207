"""`plan --check-gpu --save`: the compiled step in a file."""

import json

import pytest
from compiling import SMALL, needs_compiler, plan

from jaxpipe.plan import main


@pytest.mark.slow
@needs_compiler
def test_the_compiled_step_is_written_for_a_run_to_load(tmp_path):
    """As an H100 has loaded it, with jax 0.11.2 in both places."""
    code, _, errors = plan("--check-gpu", "h100", "--save", str(tmp_path))
    assert code == 0, errors
    (file,) = tmp_path.iterdir()
    about, _, content = file.read_bytes().partition(b"\n")
    assert json.loads(about)["the kind of device"] == "NVIDIA H100 80GB HBM3"
    assert json.loads(about)["the number of devices"] == 8
    assert len(content) > 10_000


def test_a_step_is_saved_only_if_it_is_compiled(capsys):
    assert main([SMALL, "--save", "programs"]) == 2
    assert "error: --save writes what --check-gpu compiles" in capsys.readouterr().err


@pytest.mark.extended
def test_a_step_that_calls_cudnn_is_not_saved(tmp_path):
    code, _, errors = plan(
        "--check-gpu", "h100", "--save", str(tmp_path), "model.attention=cudnn",
        "train.compute_dtype=bfloat16",
    )  # fmt: skip
    assert code == 2
    assert "--save with model.attention='cudnn'" in errors
    assert not list(tmp_path.iterdir())
