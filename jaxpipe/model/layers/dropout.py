"""Dropout with masks that are the same on every device layout, and are never stored.

A mask is a function of the seed, the sample's number in the run, the layer, the site in the layer
and the value's position in the unsharded model (Srivastava et al. 2014 for dropout; Salmon et al.
2011 for random numbers as a function of a counter). So F, B, W and rematerialised code compute the
same mask on any device and under any schedule, and a resumed run has the masks of one that was
never interrupted.

Shapes: B examples, L tokens, D model, H heads, S keys.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.core.contract.devices import OneDevice

_SITES = {"embedding": 0, "shares": 1, "attention": 2, "mlp": 3}


@dataclass(frozen=True)
class Dropout:
    """Dropout rates and seed.

    Attributes:
      rate: probability of dropping a value of the embedding, or of the output of attention or MLP.
      shares: probability of dropping an attention probability.
      seed: seed of the run.
    """

    rate: float = 0.0
    shares: float = 0.0
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.rate or self.shares)


class Masks(NamedTuple):
    """Dropout masks of one layer and microbatch on one device; `NO_MASKS` drops nothing.

    Attributes:
      dropout: rates and seed.
      key_B2: random key of each example in this layer; None if nothing is dropped.
      place_L: positions of this device's L tokens in the full sequence.
      devices: the devices that share the layer.
    """

    dropout: Dropout
    key_B2: jax.Array | None
    place_L: jax.Array | None
    devices: OneDevice

    @classmethod
    def of(
        cls, dropout: Dropout, samples_B: jax.Array, layer: Any, place_L: Any, devices: OneDevice
    ) -> "Masks":
        """Masks of layer number `layer` of the model; -1 is the embedding."""
        key = jax.random.fold_in(jax.random.PRNGKey(dropout.seed), jnp.asarray(layer) + 1)
        return cls(dropout, _fold_in(key, samples_B.astype(jnp.uint32)), place_L, devices)

    @property
    def on_shares(self) -> Callable[..., jax.Array] | None:
        """`shares`; None: it drops nothing."""
        return self.shares if self.dropout.shares else None

    def stream(self, x_BLD: jax.Array, site: Literal["embedding", "attention", "mlp"]) -> jax.Array:
        """Apply dropout to the stream, or to this device's shard of its tokens."""
        if not self.dropout.rate:
            return x_BLD
        place_1L = self.devices.own_tokens(self.place_L[None])
        key_BL2 = _fold_in(self._at(site)[:, None], place_1L)
        return _apply_dropout(x_BLD, key_BL2, x_BLD.shape[-1], self.dropout.rate)

    def inputs(self, x_BLX: jax.Array, site: str, rate: float, *, local: bool) -> jax.Array:
        """Apply dropout to the input of a product; `local`: X are this device's columns."""
        first = self.devices.index() * x_BLX.shape[-1] if local else 0
        key_B2 = _fold_in(self.key_B2, jnp.uint32(zlib.crc32(site.encode())))
        key_BL2 = _fold_in(key_B2[:, None], self.place_L[None])
        return _apply_dropout(x_BLX, key_BL2, x_BLX.shape[-1], rate, first)

    def shares(self, share_BHLS: jax.Array, query: int = 0, key: int = 0) -> jax.Array:
        """Apply dropout to attention probabilities.

        The first query is the device's `query`-th, the first key the sequence's `key`-th; H counts
        this device's heads.
        """
        _, heads, queries, keys = share_BHLS.shape
        head_H = self.devices.index() * heads + jnp.arange(heads)
        key_BH2 = _fold_in(self._at("shares")[:, None], head_H[None])
        place_L = self.place_L[query : query + queries]
        key_BHL2 = _fold_in(key_BH2[:, :, None], place_L[None, None])
        return _apply_dropout(share_BHLS, key_BHL2, keys, self.dropout.shares, first=key)

    def _at(self, site: str) -> jax.Array:
        return _fold_in(self.key_B2, jnp.uint32(_SITES[site]))


NO_MASKS = Masks(Dropout(), None, None, OneDevice())


def _fold_in(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Fold numbers into keys `[..., 2]`, which are broadcast to the numbers' shape."""
    shape = jnp.broadcast_shapes(keys.shape[:-1], numbers.shape)
    fold = jax.random.fold_in
    for _ in shape:
        fold = jax.vmap(fold)
    return fold(jnp.broadcast_to(keys, (*shape, 2)), jnp.broadcast_to(numbers, shape))


def _apply_dropout(
    x: jax.Array, keys: jax.Array, count: int, rate: float, first: jax.Array | int = 0
) -> jax.Array:
    """Keep values of the last dim whose random bits reach `rate`, divided by 1 - `rate`."""
    bits = _fold_in(keys[..., None, :], (first + jnp.arange(count)).astype(jnp.uint32))[..., 0]
    keeps = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(keeps, x / (1 - rate), 0)
