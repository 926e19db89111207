"""Bytes of latent attention: slices cache latents and rings turn them, not keys and values."""

import pytest

from jaxpipe.config import Config, ParallelConfig, TrainConfig
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.planning.cost.costs import costs_of

BATCH, LENGTH, HEADS = 2, 64, 8
RANK, NOPE, ROPE, VALUE = 10, 6, 4, 5
MODEL = DeepseekConfig(
    family="deepseek", n_layers=2, d_model=24, n_heads=HEADS, d_ff=40, vocab_size=64,
    kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE,
)  # fmt: skip


def layer_of(remat="none", **how):
    train = TrainConfig(
        steps=1, grad_accum_steps=1, microbatch_size=BATCH, seq_len=LENGTH,
        compute_dtype="float32", remat=remat,
    )  # fmt: skip
    parallel = ParallelConfig(dp=how.get("cp", 1), **how)
    return costs_of(Config(model=MODEL, parallel=parallel, train=train)).kinds["layer"]


RING = {"cp": 2, "cp_method": "ring"}


@pytest.mark.parametrize(
    ("how", "values"),
    [
        ({}, LENGTH * (RANK + ROPE)),
        ({"tp": 2}, LENGTH * (RANK + ROPE)),
        ({"cp": 2}, LENGTH * (RANK + ROPE)),  # of the tokens of both devices
        (RING | {"cp_heads": 1}, LENGTH // 2 * (RANK + ROPE)),
        (RING | {"cp_heads": 2}, LENGTH * HEADS // 2 * (NOPE + ROPE + VALUE)),
    ],
    ids=str,
)
def test_slices_cache_latents(how, values):
    """Where devices exchange heads, which a latent has not, they cache keys and values."""
    assert layer_of(slices=2, **how).state == 4 * BATCH * values


@pytest.mark.parametrize("remat", ["none", "full"])
def test_expanded_keys_are_no_residuals(remat):
    """Twice as many slices, each of which makes all keys, store half as much each."""
    two, four = layer_of(remat, slices=2), layer_of(remat, slices=4)
    assert (2 * four.for_b, 2 * four.for_w) == (two.for_b, two.for_w)


def test_latents_and_their_gradients_go_round_a_ring():
    """With the tokens' positions; gradients return to their device in one more step."""
    turned = layer_of(cp=4, cp_method="ring", cp_heads=1).turned
    tokens = 4 * BATCH * LENGTH // 4
    assert turned["F"] == 3 * tokens * (RANK + ROPE + 1)
    assert turned["B"] == turned["F"] + 4 * tokens * (RANK + ROPE)
    assert turned["W"] == 0
