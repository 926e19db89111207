"""cuDNN's fused attention on one block, in plain products of any dtype."""

import jax
import jax.numpy as jnp

from jaxpipe.model.kernels import cudnn_attention as fused


class Fused:
    """Replaces the primitive of one of cuDNN's calls."""

    def __init__(self, name, causal, window=0):
        self.bind = {"fwd": self.forward, "bwd": self.backward}[name]
        self.causal, self.window = causal, window

    def forward(self, q, k, v, *unused, is_training):
        assert is_training
        assert k.shape == v.shape  # jax's function takes nothing else
        assert [x.size for x in unused] == [0] * 7
        score = self.scores(q, k)
        logsumexp = jax.nn.logsumexp(score, axis=-1)
        mixed = jnp.einsum("bhls,bshk->blhk", jnp.exp(score - logsumexp[..., None]), wide(v, q))
        return [mixed.astype(q.dtype), logsumexp]

    def backward(self, q, k, v, *rest):
        *unused, logsumexp, mixed, dmixed = rest
        assert [x.size for x in unused] == [0] * 7
        share = jnp.exp(self.scores(q, k) - logsumexp[..., None])
        dshare = jnp.einsum("blhk,bshk->bhls", dmixed, wide(v, q))
        dscore = share * (dshare - (dmixed * mixed).sum(-1).transpose(0, 2, 1)[..., None])
        dscore *= q.shape[-1] ** -0.5
        found = (
            jnp.einsum("bhls,bshk->blhk", dscore, wide(k, q)),
            narrow(jnp.einsum("bhls,blhk->bshk", dscore, q), k),
            narrow(jnp.einsum("bhls,blhk->bshk", share, dmixed), v),
        )
        return [x.astype(q.dtype) for x in found]

    def scores(self, q, k):
        score = jnp.einsum("blhk,bshk->bhls", q, wide(k, q)) * q.shape[-1] ** -0.5
        score = score.astype(jnp.promote_types(q.dtype, jnp.float32))
        seen = jnp.tri(*score.shape[-2:], dtype=bool) | (not self.causal)
        if self.window:
            seen &= ~jnp.tri(*score.shape[-2:], k=-self.window, dtype=bool)
        return jnp.where(seen, score, -1e30)


def wide(x, queries):
    """Repeat the heads of x to the number of query heads."""
    return jnp.repeat(x, queries.shape[2] // x.shape[2], 2)


def narrow(x, like):
    """Sum x over the query heads that share a head of `like`."""
    return x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[3]).sum(3)


def stands_in(monkeypatch):
    """Make CPUs run this implementation instead of cuDNN's attention, in any dtype.

    jax's own function is replaced too, for attention over all tokens.
    """
    calls = lambda name, q, causal, window: (Fused(name, causal, window), {})  # noqa: E731
    monkeypatch.setattr(fused, "_cudnn_primitive", calls)

    def library(q, k, v, *, is_causal, local_window_size):
        assert local_window_size is None
        unused = [jnp.zeros(0)] * 7
        return Fused("fwd", is_causal).forward(q, k, v, *unused, is_training=True)[0]

    monkeypatch.setattr(fused, "_of_library", library)
