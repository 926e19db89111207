"""DeepSeek-V4's attention over several blocks of queries, against a softmax over all of a row.

Against transformers it is compared in `tests/outside` and `tests/checkpoint`, in one block.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import eqns_of

from jaxpipe.model.families.deepseek_v4 import blocks
from jaxpipe.model.families.deepseek_v4.attention import MIXERS
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.layers.parts import NO_INPUTS, init_from
from jaxpipe.model.options import LayerParts

SIZES = {
    "n_layers": 1, "d_model": 16, "vocab_size": 8, "n_heads": 4, "d_ff": 8, "head_dim": 8,
    "qk_rope_head_dim": 4, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6, "n_experts": 8,
    "csa_rate": 4, "hca_rate": 16, "index_n_heads": 8, "index_head_dim": 6, "index_topk": 5,
}  # fmt: skip


def attention_of(kind, **sizes):
    config = DeepseekV4Config(**SIZES | sizes).of_kind(kind)
    return MIXERS[kind](config, LayerParts(), init_from(jax.random.key(0)))


def mixed(attention, x):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return attention(x, positions, NO_INPUTS)[0]


@pytest.mark.parametrize("window", [20, 100])
@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_blocks_of_queries_equal_one_block(kind, window, monkeypatch):
    """150 queries are 3 blocks, the last of which is padded; windows reach over blocks."""
    with jax.enable_x64(True):
        attention = attention_of(kind, sliding_window=window)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 150, 16)))
        dy = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape))

        def results():
            y, pull = jax.vjp(partial(mixed, attention), x)
            return y, pull(dy)[0]

        got = results()
        monkeypatch.setattr(blocks, "ROWS", 150)
        for one, whole in zip(got, results()):
            np.testing.assert_allclose(one, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_a_query_sees_no_later_token(kind):
    with jax.enable_x64(True):
        attention = attention_of(kind, sliding_window=8)
        x = np.random.default_rng(0).standard_normal((1, 100, 16))
        later = x.copy()
        later[:, 70:] += 1
        y, changed = (np.asarray(mixed(attention, jnp.asarray(each))) for each in (x, later))
    np.testing.assert_array_equal(y[:, :70], changed[:, :70])
    assert (y[:, 70:] != changed[:, 70:]).all()


@pytest.mark.parametrize(("kind", "most"), [("csa", 512), ("hca", 64)])
def test_no_array_has_all_queries_and_all_entries(kind, most):
    """Neither in F nor in its gradient, of 64k tokens: chosen indices alone are stored."""
    length = 65536
    attention = attention_of(kind, csa_rate=4, hca_rate=128, index_topk=512, sliding_window=128)
    x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    made = jax.make_jaxpr(jax.grad(lambda x: mixed(attention, x).sum()))(x)
    sizes = [var.aval.size for eqn, *_ in eqns_of(made.jaxpr) for var in eqn.outvars]
    assert max(sizes) <= length * most < length * length // attention.rate
