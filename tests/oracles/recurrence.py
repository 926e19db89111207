"""A linear recurrence one token after the other."""

import jax
import jax.numpy as jnp


def delta_rule(tokens, state):
    """Return what `jaxpipe.model.recurrent.chunks.delta_rule` does."""

    def step(state, token):
        q, k, v, decay, rate, start = token
        state = jnp.where(start[:, None, None, None, None], 0, state)
        state = jnp.exp(decay)[..., None, None] * state
        error = v - jnp.einsum("bgrkv,bgk->bgrv", state, k)
        state += jnp.einsum("bgk,bgr,bgrv->bgrkv", k, rate, error)
        return state, jnp.einsum("bgrkv,bgk->bgrv", state, q)

    *floats, starts = tokens
    starts = jnp.zeros(tokens.k_BLGK.shape[:2], bool) if starts is None else starts
    by_token = [jnp.moveaxis(x, 1, 0) for x in (*floats, starts)]
    state, made = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(made, 0, 1), state
