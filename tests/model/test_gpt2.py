"""GPT-2: its maths against NumPy, and the pipeline on meshes against one device."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from meshes import MODELS, problem, run, without_key_biases
from msgspec.structs import replace
from oracles.flops import OpFlops
from oracles.vanilla import VanillaSizes, vanilla_flops
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.config import ConfigError, ParallelConfig
from jaxpipe.core.contract import Context
from jaxpipe.core.schedule import Lockstep
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.train import main as train

SHARED = Lockstep(vocab_parallel=True)
SMALL = MODELS["gpt2"]


def norm(x, params):
    off = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((off * off).mean(-1, keepdims=True) + 1e-5)
    return off / deviation * params["scale"] + params["bias"]


def layer_by_hand(x, params):
    """Compute one layer of one example, head by head: `[L, D]`."""
    attn, mlp = params["attn"], params["mlp"]
    h, width, out = norm(x, params["attn_norm"]), SMALL.head_size, np.zeros_like(x)
    for head in range(SMALL.n_heads):
        own = slice(head * width, (head + 1) * width)
        q, k, v = (h @ attn[f"w{name}"][:, own] + attn[f"b{name}"][own] for name in "qkv")
        for t in range(len(x)):
            score = np.exp(q[t] @ k[: t + 1].T / np.sqrt(width))
            out[t, own] = score / score.sum() @ v[: t + 1]
    x = x + out @ attn["wo"] + attn["bo"]
    up = norm(x, params["mlp_norm"]) @ mlp["w_up"] + mlp["b_up"]
    gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return x + gelu @ mlp["w_down"] + mlp["b_down"]


def test_the_loss_is_that_of_a_plain_reference():
    with jax.enable_x64(True):
        decoder, ends, layers, batch = problem("gpt2", jnp.float64)
        rows = {name: leaf[0, :1] for name, leaf in batch.items()}
        x = decoder.embed(ends, rows)
        for params in layers:
            x = decoder.layer(params, x, Context(rows)).y
        got = decoder.head(ends, x, rows)
    ends, layers = jax.tree.map(np.asarray, (ends, layers))
    tokens, targets = (np.asarray(rows[name][0]) for name in ("inputs", "targets"))
    x = ends["embed"][tokens] + ends["positions"][: len(tokens)]
    for params in layers:
        x = layer_by_hand(x, params)
    logits = norm(x, ends["final_norm"]) @ ends["embed"].T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -sum(log_p[t, target] for t, target in enumerate(targets) if target >= 0)
    assert float(got) == pytest.approx(want, rel=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("1f1b", (2, 2, 2), {"sequence": True, "zero_stage": 3}),
        ("zb_h1", (2, 1, 4), {"lockstep": SHARED, "sequence": True, "loss_chunks": 2}),
        ("interleaved_1f1b", (2, 4, 1), {"cp": 2, "zero_stage": 2}),
        ("dualpipe", (2, 2, 2), {"lockstep": SHARED, "zero_stage": 2, "remat": "full"}),
        ("zb_h1", (2, 2, 2), {"slices": 2, "cp": 2, "sequence": True, "remat": "selective"}),
    ],
    ids=str,
)
def test_schedules_on_meshes(schedule, mesh, how):
    how |= {"dtype": jnp.float64, "poison_bubbles": True}
    with jax.enable_x64(True):
        got, want = (without_key_biases(made) for made in run("gpt2", schedule, *mesh, **how))
        assert_same(got, want)


RUN = """
[model]
preset = "gpt2"
n_layers = 2
[train]
steps = 1
grad_accum_steps = 2
microbatch_size = 1
seq_len = 1024
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gpt2.toml"
    path.write_text(RUN)
    return path


@pytest.mark.slow
def test_it_trains_and_goes_on_under_another_mesh(file, tmp_path):
    small = [
        "model.d_model=16", "model.n_heads=4", "model.d_ff=32", "model.vocab_size=256",
        "model.max_seq_len=24", "train.seq_len=16", "train.grad_accum_steps=4", "data.source=dummy",
        "optimizer.decay=constant", "log.tensorboard=false", "runtime.cpu_devices=8",
    ]  # fmt: skip

    def losses(directory, *overrides):
        assert train([str(file), f"run.dir={directory}", *small, *overrides]) == 0
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    one = ["parallel.pp=2", "parallel.tp=2", "parallel.dp=2", "parallel.vocab_parallel_pp=true"]
    one += ["train.microbatch_size=2"]
    other = ["parallel.dp=8", "parallel.cp=2", "parallel.zero_stage=3", "train.microbatch_size=1"]
    whole = losses(tmp_path / "whole", "train.steps=3", *one)
    losses(tmp_path / "parts", "train.steps=2", *one)
    parts = losses(tmp_path / "parts", "train.steps=3", *other)
    assert whole[2] < whole[0]
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_counts_the_products_of_a_vanilla_transformer(file, tp):
    """With every score computed; two blocks of queries compute half as many."""
    config = configs.load(file, ["model.vocab_size=50304", f"parallel.tp={tp}"])
    costs = costs_of(config)
    products = vanilla_flops(VanillaSizes(s=1024, b=1, h=768, a=12, t=tp))
    square = products.pop("scores") + products.pop("scores @ v")
    want = sum(products.values(), OpFlops())
    layer = costs.kinds["layer"]
    assert (layer.F, layer.B, layer.W) == (
        want.F + 3 / 4 * square.F,
        want.B + 3 / 4 * square.B,
        want.W,
    )
    assert costs.head.flops() == 3 * 2 * 1024 * 768 * 50304 / tp
    part = replace(config, model=config.model.part(tp), parallel=ParallelConfig())
    of_part = costs_of(part)
    assert (of_part.kinds["layer"].W, of_part.head.flops()) == (layer.W, costs.head.flops())
    of_step = 2 * tp * (want + square).F + 2 * 1024 * 768 * 50304
    assert 1024 * config.model.flops_per_token(1024) == 3 * of_step


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.seq_len=1025"],
            "train.seq_len=1025 must be at most model.max_seq_len=1024: the longest sequence that "
            "the model is made for; change one of them.",
        ),
        (["model.max_seq_len=0"], "model.max_seq_len: expected `int` >= 1, got 0"),
        (["model.n_heads=11"], "model.d_model=768 must be a multiple of model.n_heads=11"),
        (["model.rope_theta=1.0"], "unknown key model.rope_theta"),
        (["model.attention=cudnn"], "needs an NVIDIA GPU and cuDNN"),
    ],
)
def test_what_it_does_not_have_is_refused(file, overrides, message):
    with pytest.raises(ConfigError) as error:
        resolved(configs.load(file, overrides), platform="cpu")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_its_keys_go_round_with_the_fused_kernel(file):
    """It has no window, which the kernel could not apply."""
    words = "parallel.dp=2 parallel.cp=2 parallel.cp_method=ring model.attention=cudnn"
    resolved(configs.load(file, [*words.split(), "train.compute_dtype=bfloat16"]))
