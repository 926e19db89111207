"""A decoder as pure functions of plain parameter trees; it does not know that it is pipelined."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.config import ModelConfig
from jaxpipe.model.layers import DecoderLayer, Ends, Init, Past, init_from
from jaxpipe.model.loss import chunked_cross_entropy_sum, count_valid, cross_entropy_sum
from jaxpipe.partition.devices import ONE_DEVICE, Cut, OneDevice
from jaxpipe.partition.sequence import WHOLE_SEQUENCE, WholeSequence

Tree = Any


@dataclass(frozen=True)
class Decoder:
    """The functions of one model.

    A microbatch is a dict of `inputs [B, L]`, `targets [B, L]` (-100: ignored) and optionally
    `positions [B, L]` (default: 0, 1, ... along each example). Where `devices` share the layers,
    all functions but those that make parameters work on one device's parts; `end_devices` are those
    that share the ends, if these are others. The loss may be made in chunks of the sequence, of
    which only one's logits are held. Of a shared `sequence` L is a device's stretch. Where
    sequences are cut into `slices` in time, L is that of a slice, and a microbatch also has `slice
    [B]`: which of the slices it is, the same for all B.
    """

    config: ModelConfig
    devices: OneDevice = ONE_DEVICE
    loss_chunks: int = 1
    end_devices: OneDevice | None = None
    sequence: WholeSequence = WHOLE_SEQUENCE
    slices: int = 1

    def init_ends(self, key: jax.Array) -> Tree:
        """Embedding, final norm and head, as a nested dict of float32 arrays."""
        return _values(Ends(self.config, self._of_ends, init_from(key)))

    def init_layer(self, key: jax.Array, index: jax.Array | int) -> Tree:
        """Parameters of layer `index`: a function of key, index and parameter names alone."""
        own = init_from(jax.random.fold_in(key, index))
        return _values(DecoderLayer(self.config, self.devices, self.sequence, own))

    @cached_property
    def cuts(self) -> dict[str, Tree]:
        """How devices share each parameter: the trees of `shared` and of a `layer`, of `Cut`s."""

        def cut(name: str, shape: tuple[int, ...], std: float | None, cut: Cut) -> nnx.Param:
            return nnx.Param(replace(cut, shape=shape))

        return {
            "shared": _values(Ends(self.config, self._of_ends, cut)),
            "layer": _values(DecoderLayer(self.config, self.devices, self.sequence, cut)),
        }

    def embed(self, ends: Tree, microbatch: Tree) -> jax.Array:
        """Tokens to `x [B, L, D]`."""
        return nnx.merge(self._ends, ends).enter(microbatch["inputs"])

    def layer(self, params: Tree, x: Tree, microbatch: Tree) -> Tree:
        """One layer, `[B, L, D] -> [B, L, D]`; of slices x comes and goes with a `state`."""
        if self.slices == 1:
            y, _ = nnx.merge(self._layer, params)(x, self._positions(x, microbatch, 0))
            return y
        x, (keys, values) = x
        begin = microbatch["slice"][0] * self._length(x) * self.sequence.size
        past = Past(keys, values, begin)
        y, past = nnx.merge(self._layer, params)(x, self._positions(x, microbatch, begin), past)
        return y, (past.keys_BSGK, past.values_BSGK)

    def state(self, x: jax.Array, microbatch: Tree) -> Tree:
        """Keys and values `[B, S, G, K]` of a sequence of which no slice has passed."""
        heads = max(self.config.n_kv_heads // self.devices.size, 1)
        tokens = self.slices * self._length(x) * self.sequence.size
        empty = jnp.zeros((x.shape[0], tokens, heads, self.config.head_size), x.dtype)
        return empty, empty

    def head(self, ends: Tree, x: jax.Array, microbatch: Tree) -> jax.Array:
        """Summed cross-entropy of the microbatch, in nats."""
        x, head = nnx.merge(self._ends, ends).leave(x)
        targets = microbatch["targets"]
        if self.loss_chunks > 1:
            return chunked_cross_entropy_sum(x, head, targets, self._of_ends, self.loss_chunks)
        return cross_entropy_sum(x @ head, targets, self._of_ends)

    def count(self, microbatch: Tree) -> jax.Array:
        """Number of tokens that the loss counts."""
        return count_valid(microbatch["targets"])

    def _length(self, x: jax.Array) -> int:
        """L, of which the stream may have a part."""
        return x.shape[1] * (self.devices.size if self.devices.sequence else 1)

    def _positions(self, x: jax.Array, microbatch: Tree, begin: jax.Array | int) -> jax.Array:
        """Given, or counted along each example from where the slice begins: `[B, L]`."""
        if (positions := microbatch.get("positions")) is not None:
            return positions
        length = self._length(x)
        own = begin + self.sequence.start(length) + jnp.arange(length)
        return jnp.broadcast_to(own, (x.shape[0], length))

    @property
    def _of_ends(self) -> OneDevice:
        return self.end_devices or self.devices

    @cached_property
    def _ends(self) -> nnx.GraphDef:
        return _graph(lambda init: Ends(self.config, self._of_ends, init))

    @cached_property
    def _layer(self) -> nnx.GraphDef:
        return _graph(lambda init: DecoderLayer(self.config, self.devices, self.sequence, init))


def _graph(module: Callable[[Init], nnx.Module]) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: module(init_from(jax.random.key(0)))))


def _values(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
