"""Attention by cuDNN at real sizes, in steps compiled for H100s that are not present."""

import json
import os
import subprocess
import sys

import pytest
from compiling import HAS_CUDNN, LLAMA, needs_compiler

PROGRAM = """
import json, sys
from jaxpipe.lab.gpu.check import check_step
from jaxpipe.lab.gpu.several import load_requests
(request,) = load_requests(sys.argv[1], sys.argv[3:], ["h100"], [], [])
found = check_step(request.plan, request.card)
calls, text = found.program.custom_calls, found.program.text
shares = [one._asdict() for one in found.collectives.shares]
squares = sum(map(text.count, sys.argv[2].split()))
print(json.dumps([found.fits, found.program.hidden, calls, squares, shares]))
"""


def compiled(squares, *given):
    """Return facts of a program compiled for H100s, with the number of shapes that end so."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, LLAMA, squares, *given],
        capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return json.loads(run.stdout)


ONE_LAYER = (
    "train.seq_len=8192", "train.remat=full", "model.n_layers=4", "parallel.layer_split=even",
    "train.grad_accum_steps=8",
)  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not HAS_CUDNN, reason="needs nvidia-cudnn-cu13")
def test_packed_rows_have_no_square_of_scores_or_of_a_mask():
    """The 8B's sizes at 8,192 tokens, one layer a rank."""
    fits, hidden, calls, squares, _ = compiled("8192,8192", *ONE_LAYER, "data.packing=best_fit")
    assert fits
    assert hidden
    assert calls["__cudnn$fmhaSoftmax"] > 0
    assert calls["__cudnn$fmhaSoftmaxBackward"] > 0
    assert not any("Bias" in name for name in calls)
    assert squares == 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not HAS_CUDNN, reason="needs nvidia-cudnn-cu13")
def test_keys_go_round_behind_the_fused_kernels_blocks():
    """Three blocks of own and of two replicas' tokens: in F, again in BW, and their gradients."""
    fits, hidden, calls, squares, shares = compiled(
        "8192,8192 2048,2048", *ONE_LAYER, "parallel.cp=2", "parallel.cp_method=ring"
    )
    assert fits
    assert hidden
    assert calls["__cudnn$fmhaSoftmax"] % 3 == calls["__cudnn$fmhaSoftmaxBackward"] % 3 == 0
    assert not any("Bias" in name for name in calls)
    assert squares == 0
    (ring,) = (
        one for one in shares
        if (one["kind"], one["axes"], one["looped"]) == ("collective-permute", ["dp"], True)
    )  # fmt: skip
    size, behind = ring["actions"]["F"]
    assert behind == size > 0
    size, behind = ring["actions"]["BW"]
    assert behind > 0.6 * size > 0  # all but the last ring step's gradients, in float32
