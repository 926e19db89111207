"""Linear recurrences one token after the other."""

import jax
import jax.numpy as jnp
import numpy as np


def linear_recurrence(tokens, state):
    """Return what `jaxpipe.model.recurrent.chunks.linear_recurrence` does."""

    def step(state, token):
        q, k, v, decay, rate, start = token
        state = jnp.where(start[:, None, None, None, None], 0, state)
        by_channel = decay if decay.ndim == v.ndim else decay[..., None]
        state = jnp.exp(by_channel)[..., None] * state
        if rate is not None:
            v = rate[..., None] * (v - jnp.einsum("bgrkv,bgk->bgrv", state, k))
        state += jnp.einsum("bgk,bgrv->bgrkv", k, v)
        return state, jnp.einsum("bgrkv,bgk->bgrv", state, q)

    *floats, starts = tokens
    starts = jnp.zeros(tokens.k_BLGK.shape[:2], bool) if starts is None else starts
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*floats, starts))
    state, made = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(made, 0, 1), state


def mamba_2(weights, x, config):
    """Return a Mamba-2's outputs `[L, D]` at x `[L, D]`, and the steps of its tokens, `[L, H]`."""
    heads, groups, taps = config.mamba_heads, config.mamba_groups, config.mamba_taps

    def silu(x):
        return x / (1 + np.exp(-x))

    def convolved(name):
        product, kernel = x @ weights[f"w{name}"], weights[f"conv_{name}"]
        window = np.concatenate([np.zeros((taps - 1, product.shape[1])), product])
        total = sum(kernel[t] * window[t : t + len(x)] for t in range(taps))
        return silu(total + weights[f"conv_{name}_bias"])

    values = convolved("x").reshape(len(x), heads, -1)
    keys, queries = (convolved(name).reshape(len(x), groups, -1) for name in "bc")
    keys, queries = (np.repeat(array, heads // groups, axis=1) for array in (keys, queries))
    steps = np.log1p(np.exp(x @ weights["step"] + weights["step_bias"]))
    steps = np.maximum(steps, config.mamba_step_min)
    state, mixed = np.zeros((heads, keys.shape[-1], values.shape[-1])), []
    for v, k, q, step in zip(values, keys, queries, steps):
        decay = np.exp(-np.exp(weights["log_decay"]) * step)
        state = decay[:, None, None] * state + np.einsum("h,hn,hp->hnp", step, k, v)
        mixed.append(np.einsum("hnp,hn->hp", state, q) + weights["skip"][:, None] * v)
    gated = np.stack(mixed).reshape(len(x), -1) * silu(x @ weights["wz"])
    gated = gated.reshape(len(x), groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + config.norm_eps)
    return (normed.reshape(len(x), -1) * weights["norm_scale"]) @ weights["wo"], steps
