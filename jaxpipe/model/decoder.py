"""What decoders of every family have in common, as pure functions of plain parameter trees.

A decoder does not know that it is pipelined.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.contract import Context, LayerKind, LayerOutput, Names, Rounds, StageFunctions
from jaxpipe.model.attention import Attend, Past
from jaxpipe.model.decoder_config import DecoderConfig
from jaxpipe.model.dropout import NO_MASKS, Dropout, Masks
from jaxpipe.model.fp8 import PLAIN, Precision
from jaxpipe.model.loss import chunked_cross_entropy_sum, count_valid, cross_entropy_sum
from jaxpipe.model.packed import Documents
from jaxpipe.model.parts import EndParts, Given, Init, Parts, init_from
from jaxpipe.partition.devices import ONE_DEVICE, OneDevice
from jaxpipe.partition.experts import ALL_EXPERTS, AllExperts
from jaxpipe.partition.leaf import Leaf
from jaxpipe.partition.sequence import WHOLE_SEQUENCE, WholeSequence

Tree = Any


@dataclass(frozen=True)
class CausalDecoder:
    """The functions of one model; a family says which modules its layers and ends are.

    A microbatch is a dict of `inputs [B, L]`, `targets [B, L]` (-100: ignored) and optionally
    `positions [B, L]` (default: 0, 1, ... along each example). Where `devices` share the layers,
    all functions but those that make parameters work on one device's parts; `end_devices` are those
    that share the ends, if these are others. The loss may be made in chunks of the sequence, of
    which only one's logits are held. Of a shared `sequence` L is a device's stretch. Where
    sequences are cut into `slices` in time, L is that of a slice, and a microbatch also has `slice
    [B]`: which of the slices it is, the same for all B. Where it has `samples [B, L]`, the numbers
    of its examples in the run, values are dropped as the configuration and the `seed` say. With
    `z_loss` the head has two losses. Rows of up to so many `documents` must have `segments [B, L]`
    and `positions`, as `Documents` has them; 0: a row is one text. Where layers have experts,
    `replicas` have these in parts, `product` multiplies groups of rows with them, and the choice
    may be `recorded`: layers then give it back as `routes`, of the form in which it is replayed.
    Rows that are one text and end in padding then have `real [B, L]`, 1 at tokens and 0 there.
    `precision` is that of products with the weights of layers.
    """

    config: DecoderConfig
    devices: OneDevice = ONE_DEVICE
    loss_chunks: int = 1
    end_devices: OneDevice | None = None
    sequence: WholeSequence = WHOLE_SEQUENCE
    slices: int = 1
    seed: int = 0
    z_loss: float = 0.0
    documents: int = 0
    replicas: AllExperts = ALL_EXPERTS
    product: Callable[..., jax.Array] = jax.lax.ragged_dot
    recorded: bool = False
    precision: Precision = PLAIN

    @property
    def products(self) -> tuple[str, ...]:
        """The names by which its layers give their weights to `dot`."""
        raise NotImplementedError

    @property
    def attend(self) -> Attend:
        """How tokens of its layers are mixed."""
        raise NotImplementedError

    def new_layer(self, kind: str, parts: Parts, init: Init) -> nnx.Module:
        """A layer of a kind as a module."""
        raise NotImplementedError

    def new_ends(self, parts: EndParts, init: Init) -> nnx.Module:
        """Embedding, final norm and head as a module, whose `leave` says what the head multiplies.

        That is `[B, L, D]` of all tokens, and its matrix `[D, V]`.
        """
        raise NotImplementedError

    def embed(self, ends: Tree, rows: Tree) -> jax.Array:
        """Tokens to `x [B, L, D]`."""
        raise NotImplementedError

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; of slices the state has keys and values."""
        raise NotImplementedError

    def init_ends(self, key: jax.Array) -> Tree:
        """Embedding, final norm and head, as a nested dict of float32 arrays."""
        return _values(self._new_ends(init_from(key)))

    def init_layer(self, key: jax.Array, index: jax.Array | int, kind: str = "layer") -> Tree:
        """Parameters of layer `index`: a function of key, index and parameter names alone."""
        return _values(self._new_layer(kind, init_from(jax.random.fold_in(key, index))))

    @cached_property
    def leaves(self) -> dict[str, Tree]:
        """How devices share each parameter: the trees of `shared` and of a layer by its kind."""

        def leaf(name: str, shape: tuple[int, ...], std: float | None, leaf: Leaf) -> nnx.Param:
            dims = len(shape)
            matrix = (dims - 2, dims - 1) if dims > 1 else None
            return nnx.Param(replace(leaf, shape=shape, matrix=matrix))

        layers = {kind: _values(self._new_layer(kind, leaf)) for kind in self.kinds}
        return {"shared": _values(self._new_ends(leaf))} | layers

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers, in the order in which they first come."""
        return tuple(dict.fromkeys(self.config.layer_kinds))

    @property
    def dropout(self) -> Dropout:
        """What is dropped in training."""
        return Dropout(self.config.dropout, self.config.attention_dropout, self.seed)

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it."""
        state, precision = self.state if self.slices > 1 else None, self.precision
        kinds = {
            kind: LayerKind(
                partial(self.layer, kind=kind),
                self.leaves[kind],
                state,
                self.kept(kind),
                pair=self.pair(kind),
                observed=precision.observed,
            )
            for kind in self.kinds
        }  # fmt: skip
        reads = ["inputs", "targets", "positions"]
        reads += ["slice"] * (self.slices > 1) + ["samples"] * bool(self.dropout)
        reads += ["segments"] * bool(self.documents)
        functions = StageFunctions(
            self.embed, kinds, self.head, self.count,
            order=self.config.layer_kinds if len(kinds) > 1 else None,
            losses=("loss", "z_loss") if self.z_loss else ("loss",),
            leaves=self.leaves["shared"], reads=tuple(reads),
            report=lambda side: {},
        )  # fmt: skip
        variables = precision.variables(self.config.n_layers, len(self.products))
        if not variables:
            return functions
        return functions.with_variables(variables, precision.next_variables)

    def kept(self, kind: str) -> tuple[str, ...]:
        """Names of what F stores of a layer of a kind, whatever is rematerialised."""
        return ()

    def pair(self, kind: str) -> Callable[[Names, Names], Rounds] | None:
        """How a layer of a kind runs beside another's gradient; None: nothing waits."""
        return None

    def state(self, x: jax.Array, rows: Tree) -> Tree:
        """Keys and values `[B, S, G, K]` of a sequence of which no slice has passed.

        In a ring S are the tokens of a device's group.
        """
        heads = max(self.config.key_heads // self.devices.size, 1)
        heads = max(heads // max(self.sequence.heads, 1), 1)
        tokens = self.slices * self._length(x) * self.sequence.size // self.sequence.ring
        empty = jnp.zeros((x.shape[0], tokens, heads, self.config.head_size), x.dtype)
        return empty, empty

    def head(self, ends: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        """Summed cross-entropy of the microbatch, in nats; with `z_loss` an array of both."""
        x, head = nnx.merge(self._ends, ends).leave(x)
        targets, devices = rows["targets"], self._of_ends
        last = self.z_loss, self.config.vocab_size
        if self.loss_chunks > 1:
            return chunked_cross_entropy_sum(x, head, targets, devices, self.loss_chunks, *last)
        return cross_entropy_sum(x @ head, targets, devices, *last)

    def count(self, rows: Tree) -> jax.Array:
        """Number of tokens that the loss counts."""
        return count_valid(rows["targets"])

    def _length(self, x: jax.Array) -> int:
        """L, of which the stream may have a part."""
        return x.shape[1] * (self.devices.size if self.devices.sequence else 1)

    def _positions(self, rows: Tree, batch: int, length: int) -> jax.Array:
        """Given, or counted along each example from where its slice begins: `[B, L]`."""
        if (positions := rows.get("positions")) is not None:
            return positions
        return jnp.broadcast_to(self._places(rows, length), (batch, length))

    def _masks(self, rows: Tree, layer: Any, length: int) -> Masks:
        """What is dropped in a layer, or with -1 in the embedding, of L tokens."""
        if not self.dropout or "samples" not in rows:
            return NO_MASKS
        places = self._places(rows, length)
        return Masks.of(self.dropout, rows["samples"][:, 0], layer, places, self.devices)

    def _places(self, rows: Tree, length: int) -> jax.Array:
        """Where in their sequences this device's tokens stand, `[L]`."""
        return self._begin(rows, length) + jnp.asarray(self.sequence.places(length))

    def _given(self, x: jax.Array, context: Context) -> Given:
        """What a call of a layer is given beside the stream."""
        return Given(
            self._past(x, context),
            self._masks(context.rows, context.index, self._length(x)),
            self._documents(context.rows),
            self.precision.dot(self.products, self.devices, context),
        )

    def _documents(self, rows: Tree) -> Documents | None:
        """Of packed rows what tokens belong to; `ValueError` where the rows do not tell."""
        if not self.documents:
            return None
        if not {"segments", "positions"} <= rows.keys():
            raise ValueError(
                f"the model is built for packed rows, which have `segments` and `positions`, but "
                f"the batch has only {', '.join(rows)}: give both, or build it with documents=0."
            )
        return Documents(rows["segments"], rows["positions"])

    def _past(self, x: jax.Array, context: Context) -> Past | None:
        """Of a slice the keys and values before it."""
        if self.slices == 1:
            return None
        return Past(*context.state, self._begin(context.rows, self._length(x)))

    def _begin(self, rows: Tree, length: int) -> jax.Array | int:
        """How many of the sequence's tokens come before this slice."""
        return rows["slice"][0] * length * self.sequence.size if self.slices > 1 else 0

    @property
    def _of_ends(self) -> OneDevice:
        return self.end_devices or self.devices

    def _new_layer(self, kind: str, init: Init) -> nnx.Module:
        names = "replicas", "product", "recorded"
        experts = {name: getattr(self, name) for name in names}
        return self.new_layer(kind, Parts(self.devices, self.attend, **experts), init)

    def _new_ends(self, init: Init) -> nnx.Module:
        return self.new_ends(EndParts(self._of_ends), init)

    @cached_property
    def _layers(self) -> dict[str, nnx.GraphDef]:
        return {kind: _graph(partial(self._new_layer, kind)) for kind in self.kinds}

    @cached_property
    def _ends(self) -> nnx.GraphDef:
        return _graph(self._new_ends)


def _graph(module: Callable[[Init], nnx.Module]) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: module(init_from(jax.random.key(0)))))


def _values(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
