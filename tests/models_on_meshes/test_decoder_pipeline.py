"""The real decoder in the pipeline against the reference: attention, norms, embedding, head."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.loss import IGNORE
from jaxpipe.schedules import build

CONFIG = LlamaConfig(
    n_layers=5,
    d_model=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=48,
    vocab_size=40,
    qk_norm=True,
)


def run(name, counts, dp, dtype=jnp.float32, terms=1, **execution):
    decoder, key = LlamaDecoder(CONFIG), jax.random.key(0)
    layout, pp, microbatches = StageLayout(counts), len(counts), len(counts) + 2
    count = lambda microbatch: terms * decoder.count(microbatch)  # noqa: E731
    functions = replace(decoder.functions, count=count)
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)  # noqa: E731
    shared = cast(decoder.init_embed_head(key))
    layers = [cast(decoder.init_layer(key, i)) for i in range(5)]
    tokens = jax.random.randint(jax.random.key(1), (microbatches, 2 * dp, 13), 0, 40)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    targets = jnp.where(targets % 7 == 3, IGNORE, targets).at[1].set(IGNORE)
    batch = {"inputs": inputs, "targets": targets}
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    schedule = build(name, pp=pp, microbatches=microbatches)
    pipeline = Pipeline(functions, schedule, mesh, counts, Execution(**execution))
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.losses_and_gradients)(params, batch)
    losses, gradients = losses_and_gradients_ref(functions, shared, layers, batch)
    return got, (losses, gradients | {"layers": layout.stack(gradients["layers"])})


@pytest.mark.slow(unless=["1f1b-counts2*"])
@pytest.mark.parametrize(
    ("name", "counts", "dp", "remat"),
    [
        ("1f1b", (5,), 1, "none"),
        ("1f1b", (3, 2), 2, "full"),
        ("1f1b", (2, 1, 1, 1), 2, "selective"),
        ("gpipe", (1, 3, 1), 1, "selective"),
    ],
)
def test_stages_that_differ_in_length(name, counts, dp, remat):
    with jax.enable_x64(True):
        assert_same(*run(name, counts, dp, jnp.float64, remat=remat))


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_gradients():
    got, want = run("1f1b", (3, 2), 1, compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(got[1])} == {jnp.dtype("float32")}
    np.testing.assert_allclose(got[0], want[0], rtol=2e-2, atol=1e-6)
    for g, w in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
        rms = np.sqrt(np.mean(np.square(g - w)) / np.mean(np.square(w)))
        assert rms < 3e-2


@pytest.mark.slow
def test_half_precision_does_not_lose_small_shares():
    """A term's share of the mean is far below float16's smallest number, 6e-8."""
    how = {"terms": 10**6, "compute_dtype": jnp.float16}
    (_, got), (_, want) = run("zb_h1", (3, 2), 2, **how)

    def off(got, want):
        return jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2))

    errors = jax.tree.map(off, got["embed_head"], want["embed_head"])
    assert max(jax.tree.leaves(errors)) < 2.5e-3, errors
