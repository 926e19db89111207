"""A number that tells whether the bits of two trees differ."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.contract import Tree


def fingerprint(tree: Tree) -> jax.Array:
    """The sum of all bits of a tree's leaves as words, modulo 2^32; uint32.

    One flipped bit always changes it, and so do any others but for one case in 2^32. Sums of
    integers have the same bits in any order.

    >>> tree = {"w": jnp.ones(3), "b": jnp.bfloat16(2)}
    >>> int(fingerprint(tree)), int(fingerprint(tree | {"b": jnp.bfloat16(-2)}))
    (3196076032, 3196108800)
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = min(8 * leaf.dtype.itemsize, 32)  # wider numbers are several words
        words = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{bits}"))
        total += words.astype(jnp.uint32).sum(dtype=jnp.uint32)
    return total
