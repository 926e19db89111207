"""Models of the further families on meshes against one device, in float64: loss and gradients."""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run
from oracles import fused

from jaxpipe.schedule import Lockstep

CASES = {
    # Two devices with one key/value head each, and four that share two.
    "biased, tp": ("biased", "zb_h1", (2, 1, 2), {"sequence": True}),
    "biased, shared heads": ("biased", "1f1b", (1, 2, 4), {"zero_stage": 3}),
    "gemma3": ("gemma3", "1f1b", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    "gemma3, ZeRO 3, ring": ("gemma3", "zb_h1", (2, 2, 1), {"cp": 2, "heads": 1, "zero_stage": 3}),
    "gemma3, packed, cp": ("packed_gemma3", "dualpipe", (2, 2, 2), {"cp": 2, "sequence": True}),
    "gpt_oss": ("gpt_oss", "zb_h1", (2, 2, 2), {"sequence": True, "ep": 2}),
    "gpt_oss, packed, exchanged heads": (
        "packed_gpt_oss",
        "1f1b",
        (2, 4, 1),
        {"cp": 2, "heads": 2, "ep": 2, "zero_stage": 3},
    ),
    "gpt_oss, ring": ("gpt_oss", "1f1b", (2, 2, 2), {"cp": 2, "heads": 1}),
    "gpt_oss, gathered keys": ("gpt_oss", "1f1b", (1, 2, 4), {"cp": 2, "sequence": True}),
    "gpt_oss, slices": ("gpt_oss", "1f1b", (2, 1, 2), {"slices": 2}),
    "gpt_oss, cuDNN": ("fused_gpt_oss", "1f1b", (2, 2, 2), {"cp": 2, "heads": 2}),
    "gemma3, slices": ("gemma3", "1f1b", (2, 1, 2), {"slices": 2}),
}
FEW = ["biased, shared heads", "gemma3, packed, cp", "gpt_oss", "gpt_oss, packed, exchanged heads"]


@pytest.mark.slow(unless=FEW)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_of_one_device(case, monkeypatch):
    fused.stands_in(monkeypatch)
    model, schedule, mesh, how = CASES[case]
    lockstep = Lockstep(vocab_parallel=how.pop("vocab_parallel", False))
    with jax.enable_x64(True):
        got, want = run(model, schedule, *mesh, lockstep=lockstep, dtype=jnp.float64, **how)
        assert_same(got, want)
