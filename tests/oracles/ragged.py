"""cuDNN's packed attention in plain products of any dtype.

A sequence is identified by its offset and length alone. What cuDNN leaves unwritten is NaN here:
rows that belong to no sequence, and statistics behind the end of a sequence.
"""

import jax
import jax.numpy as jnp

from jaxpipe.model.kernels import cudnn_packed as packed


class Ragged:
    """Replaces the primitive of one of cuDNN's calls."""

    def __init__(self, name, window):
        self.bind = {"fwd": self.forward, "bwd": self.backward}[name]
        self.window = window

    def forward(self, q, k, v, bias, lengths, key_lengths, offsets, key_offsets, *_, is_training):
        assert is_training
        assert bias.size == 0
        assert lengths is key_lengths
        rows, keys = Rows(q, lengths, offsets), Rows(k, lengths, key_offsets)
        score = self.scores(rows.of(q), keys.of(k), rows.valid)
        logsumexp = jax.nn.logsumexp(score, axis=-1)
        mixed = jnp.einsum("nhls,nshk->nlhk", jnp.exp(score - logsumexp[..., None]), keys.of(v, q))
        kept = jnp.where(rows.valid[:, None], logsumexp, jnp.nan)
        return rows.back(mixed, q), kept.astype(jnp.promote_types(q.dtype, jnp.float32))

    def backward(self, q, k, v, bias, lengths, _, offsets, key_offsets, *rest):
        _, _, logsumexp, mixed, dmixed = rest
        rows, keys = Rows(q, lengths, offsets), Rows(k, lengths, key_offsets)
        queries, dmixed, mixed = rows.of(q), rows.of(dmixed), rows.of(mixed)
        score = self.scores(queries, keys.of(k), rows.valid)
        share = jnp.exp(score - jnp.where(rows.valid[:, None], logsumexp, 0)[..., None])
        share = jnp.where(rows.valid[:, None, :, None], share, 0)
        dv = jnp.einsum("nhls,nlhk->nshk", share, dmixed)
        dshare = jnp.einsum("nlhk,nshk->nhls", dmixed, keys.of(v, q))
        dscore = share * (dshare - (dmixed * mixed).sum(-1).transpose(0, 2, 1)[..., None])
        dscore *= q.shape[-1] ** -0.5
        dq = jnp.einsum("nhls,nshk->nlhk", dscore, keys.of(k, q))
        dk = jnp.einsum("nhls,nlhk->nshk", dscore, queries)
        return rows.back(dq, q), keys.back(dk, k), keys.back(dv, v)

    def scores(self, q, k, valid):
        """Return scores; those that are masked or of no sequence are far below all others."""
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        score = jnp.einsum("nlhk,nshk->nhls", q, k) * q.shape[-1] ** -0.5
        back = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None]
        seen = (back >= 0) & (back < (self.window or back.size))
        return jnp.where(seen[None, None] & valid[:, None, None], score, -1e30)


class Rows:
    """The tokens of the sequences of an array `[B, S, H, K]`."""

    def __init__(self, like, lengths, offsets):
        b, s, *heads = like.shape
        place = jnp.arange(s)[None]
        self.valid = place < lengths.ravel()[:, None]  # [N, S]
        token = (offsets.ravel()[: lengths.size] // (heads[0] * heads[1]))[:, None] + place
        self.token = jnp.where(self.valid, token, b * s)

    def of(self, x, queries=None):
        """Return `[N, S, H, K]`, heads repeated to those of `queries`, with zeros behind an end."""
        flat = x.reshape(-1, *x.shape[2:])
        found = jnp.where(self.valid[..., None, None], flat[self.token % len(flat)], 0)
        return found if queries is None else jnp.repeat(found, queries.shape[2] // x.shape[2], 2)

    def back(self, x, like):
        """Scatter x back to the shape of `like`, summed over heads that share one of its heads."""
        x = x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[3]).sum(3)
        nothing = jnp.full((like.shape[0] * like.shape[1], *like.shape[2:]), jnp.nan, like.dtype)
        return nothing.at[self.token].set(x.astype(like.dtype), mode="drop").reshape(like.shape)


def stands_in(monkeypatch):
    """Make CPUs run this implementation instead of cuDNN's packed attention, in any dtype."""
    monkeypatch.setattr(
        packed, "_cudnn_primitive", lambda name, q, window: (Ragged(name, window), {})
    )
