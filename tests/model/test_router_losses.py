"""Router losses are a mean over the tokens that routers saw, whatever is masked.

The numbers are those of `oracles.plain_mixture`: one device, plain `jax.grad`, row by row.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from mixtures import LENGTH, MODELS, held, padded, pipeline_of, problem
from oracles import plain_mixture

from jaxpipe.core.executor import step_ref
from jaxpipe.core.mesh import shard_batch

IGNORE = plain_mixture.IGNORE
CONFIG = MODELS["qwen"]


def masked(batch):
    """Return a batch of a prompt and short answers: 1 target in 8, none in the first microbatch."""
    counts = np.zeros(batch["targets"].shape, bool)
    counts[1:, :, LENGTH // 2] = True
    return batch | {"targets": np.where(counts, batch["targets"], IGNORE)}


def batch_of(padding=""):
    """Return shared parameters, layers, and such a batch; `padding` adds padding to its rows."""
    _, shared, layers, batch, _ = problem("qwen")
    batch = masked(jax.tree.map(np.asarray, batch))
    return shared, layers, padded(batch, padding == "packed") if padding else batch


@cache
@jax.enable_x64(True)
def plain(padding=""):
    """Return cross-entropy, router losses, and the gradient of their sum, by the reference."""
    shared, layers, batch = batch_of(padding)
    lengths = held() if padding else np.full(batch["inputs"].shape[:2], LENGTH)
    rows = [
        (batch["inputs"][at][:length], batch["targets"][at][:length])
        for at, length in np.ndenumerate(lengths)
        if length
    ]

    def total(params):
        made = plain_mixture.losses(params, CONFIG, rows)
        return sum(made), made

    params = {"embed_head": shared, "layers": layers}
    with jax.numpy_rank_promotion("allow"):
        gradients, made = jax.grad(total, has_aux=True)(params)
    return *made, gradients


CASES = {
    "one device": ("gpipe", (1,), {}),
    "dp and ep": ("1f1b", (2, 2, 1, 2), {}),
    "tp and sequence parallel": ("zb_h1", (2, 2, 2, 1), {"sequence": True, "zero_stage": 2}),
    "cp": ("1f1b", (2, 2), {"cp": 2}),
    "rows that end in padding": ("zbv", (2, 2, 1, 2), {"padding": "real"}),
    "packed rows": ("dualpipe", (2, 2), {"padding": "packed"}),
    "one packed row after the other": ("gpipe", (1,), {"padding": "packed"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_router_losses_are_means_over_the_tokens(case):
    name, mesh, how = CASES[case]
    how = dict(how)
    padding, cp = how.pop("padding", ""), how.get("cp", 1)
    with jax.enable_x64(True):
        pipeline = pipeline_of("qwen", name, *mesh, documents=padding == "packed", **how)
        shared, layers, batch = batch_of(padding)
        layout = pipeline.layout(len(layers))
        params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
        dp = mesh[1] if len(mesh) > 1 else 1
        got = jax.jit(pipeline.step)(params, shard_batch(batch, slices=1, cp=cp, dp=dp))
        cross_entropy, added, gradients = plain(padding)
        staged = gradients | {"layers": layout.stack(gradients["layers"])}
        assert_same(got.losses.sum(), cross_entropy)
        assert_same(got.aux_losses.sum(), added)
        assert_same(got.gradients, pipeline.sharding.pad(staged))
        assert int(got.counts.sum()) == int((batch["targets"] != IGNORE).sum())


@pytest.mark.slow
def test_the_reference_is_the_oracle_too():
    with jax.enable_x64(True):
        decoder = problem("qwen")[0]
        shared, layers, batch = batch_of()
        got = step_ref(decoder.functions, shared, layers, jax.tree.map(jnp.asarray, batch))
        cross_entropy, added, gradients = plain()
        assert_same((got.losses.sum(), got.aux_losses.sum()), (cross_entropy, added))
        assert_same(got.gradients, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one device", "dp and ep"])
def test_half_precision_weighs_them_alike(case):
    """float16 divides at the end: router losses must not be divided by the number of targets."""
    name, mesh, how = CASES[case]
    found = []
    for dtype in (jnp.float16, jnp.float32):
        pipeline = pipeline_of("qwen", name, *mesh, compute_dtype=dtype, **how)
        shared, layers, batch = jax.tree.map(partial(_single), batch_of())
        layout = pipeline.layout(len(layers))
        params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
        step = jax.jit(pipeline.step)
        all_masked = batch | {"targets": np.full_like(batch["targets"], IGNORE)}
        found.append([step(params, each) for each in (batch, all_masked)])
    for half, single in zip(*found):
        np.testing.assert_allclose(half.aux_losses, single.aux_losses, rtol=2e-2)
        gates = [made.gradients["layers"][0]["moe"]["router"]["gate"] for made in (half, single)]
        assert np.linalg.norm(gates[0] - gates[1]) < 0.1 * np.linalg.norm(gates[1])
        assert np.linalg.norm(gates[1]) > 0


def _single(leaf):
    leaf = np.asarray(leaf)
    return leaf.astype(np.float32 if leaf.dtype.kind == "f" else np.int32)
