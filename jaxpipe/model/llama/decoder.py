"""A decoder as pure functions of plain parameter trees; it does not know that it is pipelined."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.contract import Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.model.attention import Attend, Past
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama.layers import DecoderLayer, Ends
from jaxpipe.model.loss import chunked_cross_entropy_sum, count_valid, cross_entropy_sum
from jaxpipe.model.parts import Init, Parts, init_from
from jaxpipe.partition.devices import ONE_DEVICE, OneDevice
from jaxpipe.partition.leaf import Leaf
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
    [B]`: which of the slices it is, the same for all B. With `z_loss` the head has two losses.
    """

    config: LlamaConfig
    devices: OneDevice = ONE_DEVICE
    loss_chunks: int = 1
    end_devices: OneDevice | None = None
    sequence: WholeSequence = WHOLE_SEQUENCE
    slices: int = 1
    z_loss: float = 0.0

    def init_ends(self, key: jax.Array) -> Tree:
        """Embedding, final norm and head, as a nested dict of float32 arrays."""
        return _values(Ends(self.config, self._of_ends, init_from(key)))

    def init_layer(self, key: jax.Array, index: jax.Array | int, kind: str = "layer") -> Tree:
        """Parameters of layer `index`: a function of key, index and parameter names alone."""
        own = init_from(jax.random.fold_in(key, index))
        return _values(DecoderLayer(self.config, self._parts, own))

    @cached_property
    def leaves(self) -> dict[str, Tree]:
        """How devices share each parameter: the trees of `shared` and of a `layer`, of `Leaf`s."""

        def leaf(name: str, shape: tuple[int, ...], std: float | None, leaf: Leaf) -> nnx.Param:
            matrix = (0, 1) if len(shape) == 2 else None
            return nnx.Param(replace(leaf, shape=shape, matrix=matrix))

        return {
            "shared": _values(Ends(self.config, self._of_ends, leaf)),
            "layer": _values(DecoderLayer(self.config, self._parts, leaf)),
        }

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it."""
        state = self.state if self.slices > 1 else None
        reads = ("inputs", "targets", "positions", *(("slice",) if self.slices > 1 else ()))
        return StageFunctions(
            self.embed, LayerKind(self.layer, self.leaves["layer"], state), self.head, self.count,
            losses=("loss", "z_loss") if self.z_loss else ("loss",),
            leaves=self.leaves["shared"], reads=reads,
        )  # fmt: skip

    def embed(self, ends: Tree, rows: Tree) -> jax.Array:
        """Tokens to `x [B, L, D]`."""
        return nnx.merge(self._ends, ends).enter(rows["inputs"])

    def layer(self, params: Tree, x: jax.Array, context: Context) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; of slices the state has keys and values."""
        rows, past, begin = context.rows, None, 0
        if self.slices > 1:
            begin = rows["slice"][0] * self._length(x) * self.sequence.size
            past = Past(*context.state, begin)
        y, past = nnx.merge(self._layer, params)(x, self._positions(x, rows, begin), past)
        return LayerOutput(y, past and (past.keys_BSGK, past.values_BSGK))

    def state(self, x: jax.Array, rows: Tree) -> Tree:
        """Keys and values `[B, S, G, K]` of a sequence of which no slice has passed."""
        heads = max(self.config.n_kv_heads // self.devices.size, 1)
        tokens = self.slices * self._length(x) * self.sequence.size
        empty = jnp.zeros((x.shape[0], tokens, heads, self.config.head_size), x.dtype)
        return empty, empty

    def head(self, ends: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        """Summed cross-entropy of the microbatch, in nats; with `z_loss` an array of both."""
        x, head = nnx.merge(self._ends, ends).leave(x)
        targets, devices, z_loss = rows["targets"], self._of_ends, self.z_loss
        if self.loss_chunks > 1:
            return chunked_cross_entropy_sum(x, head, targets, devices, self.loss_chunks, z_loss)
        return cross_entropy_sum(x @ head, targets, devices, z_loss)

    def count(self, rows: Tree) -> jax.Array:
        """Number of tokens that the loss counts."""
        return count_valid(rows["targets"])

    def _length(self, x: jax.Array) -> int:
        """L, of which the stream may have a part."""
        return x.shape[1] * (self.devices.size if self.devices.sequence else 1)

    def _positions(self, x: jax.Array, rows: Tree, begin: jax.Array | int) -> jax.Array:
        """Given, or counted along each example from where the slice begins: `[B, L]`."""
        if (positions := rows.get("positions")) is not None:
            return positions
        length = self._length(x)
        own = begin + self.sequence.start(length) + jnp.arange(length)
        return jnp.broadcast_to(own, (x.shape[0], length))

    @property
    def _parts(self) -> Parts:
        return Parts(self.devices, Attend(self.sequence, self.config.attention))

    @property
    def _of_ends(self) -> OneDevice:
        return self.end_devices or self.devices

    @cached_property
    def _ends(self) -> nnx.GraphDef:
        return _graph(lambda init: Ends(self.config, self._of_ends, init))

    @cached_property
    def _layer(self) -> nnx.GraphDef:
        return _graph(lambda init: DecoderLayer(self.config, self._parts, init))


def _graph(module: Callable[[Init], nnx.Module]) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: module(init_from(jax.random.key(0)))))


def _values(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
