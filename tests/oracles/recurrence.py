"""Linear recurrences one token after the other."""

import jax
import jax.numpy as jnp


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
