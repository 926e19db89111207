"""The hidden units of an MLP or an expert: what its hidden products become."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe.model.variant import Gate

CLAMP, SLOPE = 7.0, 1.702  # of the clamped gate
LIMIT = 10.0  # of the limited gate


def hidden_products(kind: Gate) -> tuple[str, ...]:
    """Return the names of the products whose results `gated` takes, in their order."""
    return ("up",) if kind == "relu2" else ("gate", "up")


def gated(kind: Gate, *products: jax.Array) -> jax.Array:
    """Return a(gate) * up, where a is SiLU (SwiGLU) or the tanh form of GELU (GEGLU).

    `clamped` is gpt-oss's: SiLU with another slope, of a gate up to `CLAMP`, times up + 1, with up
    between -`CLAMP` and `CLAMP`. `limited` is DeepSeek-V4's: SiLU of a gate up to `LIMIT`, times up
    between -`LIMIT` and `LIMIT`. `relu2` has no gate: it is the square of ReLU of up (So et al.
    2021, "Primer", arXiv 2109.08668).

    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    return _GATES[kind](*products)


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)


_GATES: dict[str, Callable[..., jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped": _clamped,
    "limited": lambda gate, up: jax.nn.silu(jnp.minimum(gate, LIMIT)) * jnp.clip(up, -LIMIT, LIMIT),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}
