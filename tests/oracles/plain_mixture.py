"""A Qwen3-MoE-like decoder in plain jnp, row by row, with its losses; it uses nothing of jaxpipe.

A row is its real tokens alone, so that there is no padding to leave out. The losses are those of
published papers: cross-entropy over the targets that count; the sequence-wise balance loss of
DeepSeek-AI 2024 ("DeepSeek-V3", equations 17-20) and the z-loss of Zoph et al. 2022 ("ST-MoE",
equation 5), each a mean over the tokens of the batch.
"""

from functools import partial

import jax
import jax.numpy as jnp

IGNORE = -100


def losses(params, config, rows):
    """Return `(cross-entropy, router losses)` of rows `(inputs [L], targets [L])` of any length."""
    cross_entropy, added, targets, tokens = 0.0, 0.0, 0, 0
    for inputs, goals in rows:
        logits, more = _row(params, config, inputs)
        counts = goals != IGNORE
        picked = jax.nn.log_softmax(logits)[jnp.arange(len(goals)), jnp.where(counts, goals, 0)]
        cross_entropy -= jnp.where(counts, picked, 0).sum()
        added += more * len(inputs)
        targets, tokens = targets + counts.sum(), tokens + len(inputs)
    return cross_entropy / targets, added / tokens


def logits(params, config, inputs):
    """Return the logits `[L, V]` after each token of a row `[L]`."""
    return _row(params, config, inputs)[0]


@partial(jax.jit, static_argnums=1)  # compiled once for each length
def _row(params, config, inputs):
    """Return logits `[L, V]`, and the router losses of all layers, a mean over the row's tokens."""
    shared, added = params["embed_head"], 0.0
    x = shared["embed"][inputs]
    for layer in params["layers"]:
        x = x + _attention(layer["attn"], config, _norm(x, layer["attn_norm"], config))
        made, more = _experts(layer["moe"], config, _norm(x, layer["mlp_norm"], config))
        x, added = x + made, added + more
    return _norm(x, shared["final_norm"], config) @ shared["head"], added


def _norm(x, gain, config):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * gain["scale"]


def _attention(weights, config, x):
    length, k = len(x), config.d_model // config.n_heads
    angles = jnp.arange(length)[:, None] / config.rope_theta ** (jnp.arange(0, k, 2) / k)
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[:, None] for f in (jnp.cos, jnp.sin))

    def turned(x):  # [L, H, K]
        return x * cos + jnp.concatenate([-x[..., k // 2 :], x[..., : k // 2]], -1) * sin

    q, key, value = ((x @ weights[name]).reshape(length, -1, k) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("qhk,shk->hqs", turned(q), turned(key)) / k**0.5
    shares = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("hqs,shk->qhk", shares, value).reshape(length, -1) @ weights["wo"]


def _experts(weights, config, x):
    logits = x @ weights["router"]["gate"]
    scores = jax.nn.softmax(logits)
    best = jnp.argsort(-scores, axis=-1)[:, : config.experts_per_token]
    chosen = (best[..., None] == jnp.arange(config.n_experts)).any(1)
    share = jnp.where(chosen, scores, 0)
    share = share / share.sum(-1, keepdims=True)
    experts, made = weights["experts"], 0.0
    for e in range(config.n_experts):
        hidden = jax.nn.silu(x @ experts["w_gate"][e]) * (x @ experts["w_up"][e])
        made += share[:, e, None] * (hidden @ experts["w_down"][e])
    load = chosen.astype(x.dtype).mean(0) * config.n_experts / config.experts_per_token
    balance = (load * scores.mean(0)).sum()
    z = jax.nn.logsumexp(logits, axis=-1)
    return made, config.router_aux_loss * balance + config.router_z_loss * (z * z).mean()
