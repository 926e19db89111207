"""The gated units of an MLP or an expert: how its two hidden products become one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe.model.variant import Gate

CLAMP, SLOPE = 7.0, 1.702  # of the clamped gate
LIMIT = 10.0  # of the limited gate


def gated(kind: Gate, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return a(gate) * up, where a is SiLU (SwiGLU) or the tanh form of GELU (GEGLU).

    `clamped` is gpt-oss's: SiLU with another slope, of a gate up to `CLAMP`, times up + 1, with up
    between -`CLAMP` and `CLAMP`. `limited` is DeepSeek-V4's: SiLU of a gate up to `LIMIT`, times up
    between -`LIMIT` and `LIMIT`.

    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    return _GATES[kind](gate, up)


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)


_GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped": _clamped,
    "limited": lambda gate, up: jax.nn.silu(jnp.minimum(gate, LIMIT)) * jnp.clip(up, -LIMIT, LIMIT),
}
