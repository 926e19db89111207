"""The decoder's maths: causality, rotary positions, grouped queries, norms, losses, sizes."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_within, relative
from msgspec.structs import replace

from jaxpipe.core.contract import Context
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.model import FAMILIES, PRESETS
from jaxpipe.model.families.gemma3.config import Gemma3Config
from jaxpipe.model.families.glm4 import Glm4Config
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.llama.layers import LlamaAttention
from jaxpipe.model.layers.rope.rotate import rotary
from jaxpipe.model.loss import IGNORE, chunked_cross_entropy_sum, count_valid, cross_entropy_sum

SMALL = LlamaConfig(
    n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=48, vocab_size=50
)
QK_NORM = LlamaConfig(
    n_layers=2, d_model=32, n_heads=4, n_kv_heads=4, d_ff=48, vocab_size=50, qk_norm=True
)
WINDOWED = replace(SMALL, sliding_window=3)


def logits_of(config, tokens, key=0, **more):
    decoder, key = LlamaDecoder(config), jax.random.key(key)
    ends = decoder.init_embed_head(key)
    microbatch = {"inputs": tokens} | more
    x = decoder.embed(ends, microbatch)
    for index in range(config.n_layers):
        x = decoder.layer(decoder.init_layer(key, index), x, Context(microbatch)).y
    return jnp.asarray(x) @ ends["head"]


def tokens_of(batch, length, key=1):
    return jax.random.randint(jax.random.key(key), (batch, length), 0, 50)


@pytest.mark.parametrize("config", [SMALL, QK_NORM, WINDOWED])
def test_no_token_sees_the_future_nor_what_is_before_its_window(config):
    decoder, key = LlamaDecoder(config), jax.random.key(0)
    layer = decoder.init_layer(key, 0)
    x = jax.random.normal(jax.random.key(2), (1, 7, 32))

    def one(x, t):
        return decoder.layer(layer, x, Context({})).y[0, t].sum()

    for t in range(7):
        seen = jnp.abs(jax.grad(one)(x, t)).sum(-1)[0]
        assert not seen[t + 1 :].any()
        first = max(0, t + 1 - config.sliding_window) if config.sliding_window else 0
        assert not seen[:first].any()
        assert seen[first : t + 1].all()


def test_attention_equals_a_plain_reference():
    """Softmax attention written out head by head, with its own rotation, in numpy."""
    decoder = LlamaDecoder(SMALL)
    params = jax.tree.map(np.asarray, decoder.init_layer(jax.random.key(0), 0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 5, 32)), np.float64)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def turn(v, t):
        pairs = v[:8] + 1j * v[8:]
        turned = pairs * np.exp(1j * t * 500000.0 ** (-np.arange(8) / 8))
        return np.concatenate([turned.real, turned.imag])

    h = norm(x, params["attn_norm"]["scale"])
    out = np.zeros((2, 5, 64))
    for b in range(2):
        for head in range(4):
            mine, shared = slice(16 * head, 16 * head + 16), 16 * (head // 2)
            q = h[b] @ params["attn"]["wq"][:, mine]
            k = h[b] @ params["attn"]["wk"][:, shared : shared + 16]
            v = h[b] @ params["attn"]["wv"][:, shared : shared + 16]
            for t in range(5):
                score = np.array([turn(q[t], t) @ turn(k[s], s) / 4 for s in range(t + 1)])
                weight = np.exp(score - score.max())
                out[b, t, mine] = weight / weight.sum() @ v[: t + 1]
    y = x + out @ params["attn"]["wo"]
    h = norm(y, params["mlp_norm"]["scale"])
    gate, up = h @ params["mlp"]["w_gate"], h @ params["mlp"]["w_up"]
    want = y + (gate / (1 + np.exp(-gate)) * up) @ params["mlp"]["w_down"]
    got = decoder.layer(params, jnp.asarray(x, jnp.float32), Context({})).y
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_rotary_scores_depend_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    config = LlamaConfig(
        n_layers=1, d_model=16, n_heads=1, n_kv_heads=1, d_ff=1, vocab_size=1, rope_theta=100.0
    )

    def score(i, j):
        at = [jnp.full((1, 1), t) for t in (i, j)]
        return float(jnp.sum(rotary(q, at[0], config) * rotary(k, at[1], config)))

    assert score(3, 1) == pytest.approx(score(13, 11), rel=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


def test_a_share_of_each_head_rotates():
    """As a narrower head does; in pairs of neighbours, which scores do not tell from halves."""
    sizes = {"n_layers": 1, "d_model": 16, "n_heads": 1, "n_kv_heads": 1, "d_ff": 1}
    partial = LlamaConfig(**sizes, vocab_size=1, rotary_share=0.5)
    narrow = LlamaConfig(**sizes, vocab_size=1, head_dim=8)
    x, at = jax.random.normal(jax.random.key(0), (2, 3, 4, 16)), jnp.arange(6).reshape(2, 3)
    turned = rotary(x, at, partial)
    np.testing.assert_array_equal(turned[..., :8], rotary(x[..., :8], at, narrow))
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    neighbours = Glm4Config(**sizes, vocab_size=1, rope_theta=partial.rope_theta)
    paired = x.at[..., :8].set(
        x[..., :8].reshape(2, 3, 4, 2, 4).swapaxes(-1, -2).reshape(2, 3, 4, 8)
    )
    np.testing.assert_array_equal(rotary(paired, at, neighbours), turned)


def test_positions_can_be_given():
    tokens = tokens_of(2, 6)
    shifted = jnp.broadcast_to(jnp.arange(6) + 9, (2, 6))
    np.testing.assert_allclose(
        logits_of(SMALL, tokens), logits_of(SMALL, tokens, positions=shifted), atol=1e-5
    )
    restart = jnp.asarray([[0, 1, 2, 0, 1, 2]] * 2)
    assert not np.allclose(logits_of(SMALL, tokens), logits_of(SMALL, tokens, positions=restart))


def test_initial_values_depend_on_layer_and_name():
    decoder, key = LlamaDecoder(SMALL), jax.random.key(0)
    first, again, other = (decoder.init_layer(key, i) for i in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["attn"]["wk"], other["attn"]["wk"])
    assert not np.array_equal(first["attn"]["wk"], first["attn"]["wv"])
    # A parameter added or removed elsewhere changes nothing here.
    normed = LlamaDecoder(
        LlamaConfig(**{f: getattr(SMALL, f) for f in SMALL.__struct_fields__} | {"qk_norm": True})
    )
    np.testing.assert_array_equal(normed.init_layer(key, 1)["attn"]["wo"], other["attn"]["wo"])


AHEAD = "deepseek_v3", "glm4_5"  # presets of families that may predict further tokens


@pytest.mark.parametrize(
    ("preset", "more"),
    [*((name, {}) for name in PRESETS), *((name, {"mtp_depth": 2}) for name in AHEAD)],
)
def test_parameters_counted_by_shape(preset, more):
    family, key = FAMILIES[PRESETS[preset]["family"]], jax.random.key(0)
    config = family.config(**PRESETS[preset] | more)
    decoder = family.build(config)
    ends = jax.eval_shape(decoder.init_embed_head, key)
    total, idle = sum(leaf.size for leaf in jax.tree.leaves(ends)), 0
    for kind in dict.fromkeys(config.layer_kinds):
        layer = jax.eval_shape(partial(decoder.init_layer, index=0, kind=kind), key)
        count = config.layer_kinds.count(kind)
        for path, leaf in jax.tree.leaves_with_path(layer):
            total += count * leaf.size
            if "experts" in jax.tree_util.keystr(path, simple=True, separator="/").split("/"):
                idle += count * leaf.size * (1 - config.experts_per_token / config.routed_experts)
    assert total == config.parameter_count()
    assert config.parameter_count() - config.active_parameter_count() == idle


@pytest.mark.parametrize("chunks", [1, 4])
def test_z_loss_equals_its_formula(chunks):
    """PaLM, section 5: c log(Z)^2 of every token that counts, in float64; of capped logits."""
    with jax.enable_x64(True):
        x, head = (
            jax.random.normal(jax.random.key(i), shape)
            for i, shape in enumerate([(2, 8, 6), (6, 11)])
        )
        targets = jax.random.randint(jax.random.key(2), (2, 8), 0, 11).at[0, 3].set(IGNORE)
        valid = targets != IGNORE

        def plain(x, head):
            logits = 2 * jnp.tanh(x @ head / 2)
            log_z = jnp.log(jnp.exp(logits).sum(-1))
            at_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], -1)
            entropy = jnp.where(valid, log_z - at_target[..., 0], 0).sum()
            return jnp.stack([entropy, 0.3 * jnp.where(valid, log_z**2, 0).sum()])

        def ours(x, head):
            if chunks == 1:
                return cross_entropy_sum(x @ head, targets, z_loss=0.3, cap=2.0)
            return chunked_cross_entropy_sum(x, head, targets, ONE_DEVICE, chunks, 0.3, cap=2.0)

        assert_within(relative, 1e-13, ours(x, head), plain(x, head))
        gradients = [
            jax.grad(lambda *a, f=f: 3 * f(*a).sum(), (0, 1))(x, head) for f in (ours, plain)
        ]
        assert_within(relative, 1e-13, *gradients)
        assert cross_entropy_sum(x @ head, targets, cap=2.0) == ours(x, head)[0] or chunks > 1


def test_chunks_do_not_round_the_scale_of_all_gradients():
    """As 1 / tokens in 16 bits, here 0.22 % too large, would do."""
    x, head = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate([(4, 64, 16), (16, 32)])
    )
    targets, scale = jax.random.randint(jax.random.key(2), (4, 64), 0, 32), 1 / 380_000

    def ours(x, head):
        return chunked_cross_entropy_sum(x, head, targets, ONE_DEVICE, 4)

    of_sum, of_mean = (
        jax.grad(lambda *a, by=by: by * ours(*a), (0, 1))(x, head) for by in (1, scale)
    )
    for whole, part in zip(of_sum, of_mean):
        whole, part = (np.asarray(gradient, np.float64) for gradient in (whole, part))
        assert (whole * part).sum() / (whole * whole).sum() == pytest.approx(scale, rel=5e-4)


def test_cross_entropy_equals_the_sum_over_valid_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 5, 11)) * 4
    targets = jnp.asarray([[1, IGNORE, 3, 10, 0], [IGNORE] * 5])
    log_p = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    want = -sum(log_p[0, t, targets[0, t]] for t in (0, 2, 3, 4))
    assert float(cross_entropy_sum(logits, targets)) == pytest.approx(want, rel=1e-5)
    assert int(count_valid(targets)) == 4
    gradient = jax.grad(cross_entropy_sum)(logits, targets)
    assert not gradient[1].any()
    assert not gradient[0, 1].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize(("query_width", "factor"), [(21, (16 / 21) ** 0.5), (64, 0.5)])
def test_the_factor_on_queries_is_not_rounded(query_width, factor, dtype):
    """That of Gemma 3 27B is 0.87287, and 0.87109 in bfloat16."""
    sizes = {"n_layers": 1, "d_model": 32, "n_heads": 4, "n_kv_heads": 4, "d_ff": 48}
    config = Gemma3Config(**sizes, vocab_size=50, head_dim=16, query_width=query_width)
    with jax.enable_x64(True):
        q_BLHK = jax.random.normal(jax.random.key(0), (1, 9, 4, 16)).astype(dtype)
        first = jnp.zeros((1, 9), int)  # where nothing rotates
        placed, _ = LlamaAttention.place(SimpleNamespace(config=config), q_BLHK, q_BLHK, first)
        wide = factor * q_BLHK.astype(jnp.promote_types(dtype, jnp.float32))
        np.testing.assert_array_equal(placed, wide.astype(dtype), strict=True)


def test_half_precision_keeps_norms_and_loss_wide():
    decoder, key = LlamaDecoder(SMALL), jax.random.key(0)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder.init_embed_head(key))
    microbatch = {"inputs": tokens_of(1, 4), "targets": tokens_of(1, 4, key=3)}
    x = decoder.embed(half, microbatch)
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder.init_layer(key, 0))
    assert decoder.layer(layer, x, Context(microbatch)).y.dtype == jnp.bfloat16
    assert decoder.head(half, x, microbatch).dtype == jnp.float32


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_loss_in_chunks(chunks):
    """The same loss and gradients, without any value as large as all logits."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (2, 8, 6)), jax.random.normal(keys[1], (6, 50))
    targets = jax.random.randint(keys[2], (2, 8), 0, 50).at[0, 3].set(IGNORE)

    def whole(x, head):
        return 3 * cross_entropy_sum(x @ head, targets)

    def cut(x, head):
        return 3 * chunked_cross_entropy_sum(x, head, targets, ONE_DEVICE, chunks)

    got, want = (jax.value_and_grad(loss, (0, 1))(x, head) for loss in (cut, whole))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-6, atol=1e-6), got, want)
    np.testing.assert_allclose(cut(x, head), want[0], rtol=1e-6)

    text = str(jax.make_jaxpr(jax.grad(cut, (0, 1)))(x, head))
    assert f"f32[2,{8 // chunks},50]" in text
    assert "f32[2,8,50]" not in text
