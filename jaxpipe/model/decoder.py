"""What decoders of all families share, as pure functions of plain parameter trees.

A decoder does not know that it is pipelined.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.core.contract import Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.contract.devices import OneDevice
from jaxpipe.core.contract.layer import Pair
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.attention.keys import Cache
from jaxpipe.model.decoder_config import DecoderConfig
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.dropout import NO_MASKS, Dropout, Masks
from jaxpipe.model.layers.parts import Draw, EmbedHeadParts, Init, LayerInputs, init_from
from jaxpipe.model.loss import (
    CHOICES,
    IGNORE,
    LOGPROBS,
    ScoreOptions,
    TokenScores,
    chunked_cross_entropy_sum,
    count_valid,
    cross_entropy_sum,
    gather_shards,
    map_chunks,
    score_targets,
    softcap,
)
from jaxpipe.model.options import (
    CROSS_ENTROPY,
    PLAIN_OPS,
    UNSHARED,
    LayerParts,
    Loss,
    Ops,
    Sharing,
)

Tree = Any


@dataclass(frozen=True)
class CausalDecoder:
    """The functions of one model; a family defines the modules of layers, embedding and head.

    A microbatch is a dict of `inputs [B, L]`, `targets [B, L]` (-100: ignored) and optionally
    `positions [B, L]` (default: 0, 1, ... along each example). The attributes below name further
    keys. If layers have experts and rows are one text with padding at the end, a microbatch has
    `real [B, L]`, 1 at tokens and 0 at padding.

    Attributes:
      config: sizes and choices of the model.
      sharing: the devices that share it. All functions except those that initialise parameters
        work on one device's shards: L is the length of this device's shard of a sequence, or of a
        slice, and with slices a microbatch has `slice [B]`, the number of its slice, the same for
        all B.
      ops: the operations of its layers. With `documents` a microbatch must have `segments [B, L]`
        and `positions` as in `RowDocuments`. Dropout applies where it has `samples [B, L]`, the
        numbers of its examples in the run.
      loss: the loss of its head.
    """

    config: DecoderConfig
    sharing: Sharing = UNSHARED
    ops: Ops = PLAIN_OPS
    loss: Loss = CROSS_ENTROPY

    @property
    def products(self) -> tuple[str, ...]:
        """The names by which its layers pass their weights to `dot`."""
        raise NotImplementedError

    def with_options(self, **options: Mapping[str, Any]) -> Self:
        """The model with other fields of these attributes: `with_options(loss={"chunks": 2})`."""
        records = {name: replace(getattr(self, name), **fields) for name, fields in options.items()}
        return replace(self, **records)

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        raise NotImplementedError

    def new_embed_head(self, parts: EmbedHeadParts, init: Init) -> nnx.Module:
        """Build embedding, final norm and head as a module.

        Its `leave` returns what the head multiplies: `[B, L, D]` of all tokens, and a matrix
        `[D, V]`.
        """
        raise NotImplementedError

    def embed(self, embed_head: Tree, rows: Tree) -> jax.Array:
        """Embed tokens: `[B, L]` to x `[B, L, D]`."""
        raise NotImplementedError

    def layer(
        self, params: Tree, x: jax.Array, context: Context, kind: str = "layer"
    ) -> LayerOutput:
        """One layer, `[B, L, D] -> [B, L, D]`; with slices its state has keys and values."""
        raise NotImplementedError

    def init_embed_head(self, key: jax.Array) -> Tree:
        """Initial embedding, final norm and head, as a nested dict of float32 arrays."""
        return _values(self._build_embed_head(init_from(key)))

    def init_layer(self, key: jax.Array, index: jax.Array | int, kind: str = "layer") -> Tree:
        """Initial parameters of layer `index`: a function of key, index and names alone."""
        return _values(self._new_layer(kind, init_from(jax.random.fold_in(key, index))))

    @cached_property
    def leaves(self) -> dict[str, Tree]:
        """The `ParamSpec` of every parameter, as trees by `embed_head` and layer kind."""

        def leaf(
            name: str, shape: tuple[int, ...], std: float | Draw | None, leaf: ParamSpec
        ) -> nnx.Param:
            # What starts as zeros or ones is a bias or scale, also with one for every expert.
            is_matrix = len(shape) > 1 and std and not callable(std)
            matrix = (len(shape) - 2, len(shape) - 1) if is_matrix else None
            return nnx.Param(replace(leaf, shape=shape, matrix=matrix))

        layers = {kind: _values(self._new_layer(kind, leaf)) for kind in self.kinds}
        return {"embed_head": _values(self._build_embed_head(leaf))} | layers

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers, in order of first appearance."""
        return tuple(dict.fromkeys(self.config.layer_kinds))

    @property
    def dropout(self) -> Dropout:
        """Dropout rates and seed."""
        return Dropout(self.config.dropout, self.config.attention_dropout, self.ops.seed)

    @cached_property
    def functions(self) -> StageFunctions:
        """The model as pipeline stages see it."""
        ops, loss, slices = self.ops, self.loss, self.sharing.slices
        kinds = {
            kind: LayerKind(
                partial(self.layer, kind=kind),
                self.leaves[kind],
                partial(self.state, kind=kind) if slices > 1 else None,
                self.is_recurrent(kind),
                self.kept(kind),
                pair=self.pair(kind),
                statistics=ops.precision.observed,
                reads=self.reads(kind),
            )
            for kind in self.kinds
        }  # fmt: skip
        reads = ["inputs", "targets", "positions"]
        reads += ["slice"] * (slices > 1) + ["samples"] * bool(self.dropout)
        reads += ["segments"] * bool(ops.documents)
        functions = StageFunctions(
            self.embed, kinds, self.head, self.count,
            order=self.config.layer_kinds if len(kinds) > 1 else None,
            losses=("loss", "z_loss") if loss.z_loss else ("loss",),
            embed_head_specs=self.leaves["embed_head"], batch_keys=tuple(reads),
            report=lambda aux: {},
        )  # fmt: skip
        if loss.objective is not None:
            functions = loss.objective.applied(functions, self.token_scores)
        variables = ops.precision.variables(self.config.blocks, len(self.products))
        if not variables:
            return functions
        return functions.with_variables(variables, ops.precision.next_variables)

    def is_recurrent(self, kind: str) -> bool:
        """Whether the state of layers of a kind is recurrent (`LayerKind.recurrent`)."""
        return False

    def kept(self, kind: str) -> tuple[str, ...]:
        """Names of the values that F stores in such layers under every rematerialisation policy."""
        return ()

    def pair(self, kind: str) -> Pair | None:
        """How F of a kind runs alongside another layer's gradient; None: neither waits."""
        return None

    def reads(self, kind: str) -> tuple[str, ...]:
        """What layers of a kind read besides their own parameters (`LayerKind.reads`)."""
        return ()

    def state(self, x: jax.Array, rows: Tree, kind: str = "layer") -> Tree:
        """Empty keys and values `[B, S, G, K]`, before the first slice of a sequence.

        In a ring S counts the tokens of the group of devices that exchange heads.
        """
        sequence = self.sharing.sequence
        tokens = self.sharing.slices * self._length(x) * sequence.size // sequence.ring
        return tuple(jnp.zeros((x.shape[0], tokens, *size), x.dtype) for size in self.cached)

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """Heads and width of each array that is cached of a token's keys (`Keys.parts`)."""
        heads = max(self.config.key_heads // self.sharing.devices.size, 1)
        heads = max(heads // max(self.sharing.sequence.heads, 1), 1)
        return (heads, self.config.head_size), (heads, self.config.value_size)

    def head(self, embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        """Summed cross-entropy of the microbatch in nats; with `z_loss` both losses, `[2]`."""
        x, head = nnx.merge(self._embed_head_graph, embed_head).leave(x)
        return self.cross_entropy(x, head, rows["targets"], self.loss.z_loss)

    def cross_entropy(
        self, x: jax.Array, head: jax.Array, targets: jax.Array, z_loss: float
    ) -> jax.Array:
        """Summed cross-entropy of the logits x @ head, `[B, L, D]` and `[D, V]`, in nats."""
        config, devices = self.config, self._embed_head_devices
        last = z_loss, config.vocab_size, config.logit_cap
        if self.loss.chunks > 1:
            return chunked_cross_entropy_sum(x, head, targets, devices, self.loss.chunks, *last)
        return cross_entropy_sum(x @ head, targets, devices, *last)

    def logits(self, embed_head: Tree, x: jax.Array) -> jax.Array:
        """Logits `[B, L, V]` of the next tokens; V are this device's shard of the vocabulary."""
        x, head = nnx.merge(self._embed_head_graph, embed_head).leave(x)
        return softcap(x @ head, self.config.logit_cap)

    def next_logits(self, embed_head: Tree, x: jax.Array, rows: Tree) -> jax.Array:
        """Logits `[B, V]` after the one place in each row whose target counts, else any.

        An output of the head (`StageFunctions`), of the full vocabulary on every device.
        """
        x, head = nnx.merge(self._embed_head_graph, embed_head).leave(x)
        here_BL1, devices = (rows["targets"] != IGNORE)[..., None], self._embed_head_devices
        x_BD = jnp.where(here_BL1, x, 0).sum(axis=1)
        logits_BV = softcap(x_BD @ head, self.config.logit_cap)
        return gather_shards(logits_BV, devices)[:, : self.config.vocab_size]

    def token_scores(
        self, embed_head: Tree, x: jax.Array, rows: Tree, options: ScoreOptions = LOGPROBS
    ) -> TokenScores:
        """The scores of the targets, `[B, L]` each: an output of the head (`StageFunctions`)."""
        x, head = nnx.merge(self._embed_head_graph, embed_head).leave(x)
        config = self.config
        last = self._embed_head_devices, config.vocab_size, config.logit_cap, options

        def of_chunk(
            head: jax.Array, x: jax.Array, targets: jax.Array, *choices: jax.Array
        ) -> TokenScores:
            return score_targets(x @ head, targets, *last, *choices)

        if self.loss.chunks > 1:  # a gradient computes a chunk's logits again
            of_chunk = jax.checkpoint(of_chunk)
        arrays = x, rows["targets"], *(rows[name] for name in (CHOICES,) if name in rows)
        return map_chunks(partial(of_chunk, head), arrays, self.loss.chunks)

    def count(self, rows: Tree) -> jax.Array:
        """Number of tokens that count in the loss."""
        return count_valid(rows["targets"])

    def _length(self, x: jax.Array) -> int:
        """L; with sequence parallelism x has only this device's shard of it."""
        devices = self.sharing.devices
        return x.shape[1] * (devices.size if devices.sequence else 1)

    def _positions(self, rows: Tree, batch: int, length: int) -> jax.Array:
        """Positions from the batch, or else the tokens' positions in their sequences: `[B, L]`."""
        if (positions := rows.get("positions")) is not None:
            return positions
        return jnp.broadcast_to(self._places(rows, length), (batch, length))

    def _masks(self, rows: Tree, layer: Any, length: int) -> Masks:
        """Dropout masks of L tokens in a layer; layer -1 is the embedding."""
        if not self.dropout or "samples" not in rows:
            return NO_MASKS
        places = self._places(rows, length)
        return Masks.of(self.dropout, rows["samples"][:, 0], layer, places, self.sharing.devices)

    def _places(self, rows: Tree, length: int) -> jax.Array:
        """Positions of this device's tokens in their sequences, `[L]`."""
        return self._begin(rows, length) + jnp.asarray(self.sharing.sequence.positions(length))

    def _given(self, x: jax.Array, context: Context) -> LayerInputs:
        """The arguments of a layer call besides the stream."""
        return LayerInputs(
            self._cache(x, context),
            self._masks(context.rows, context.index, self._length(x)),
            self._documents(context.rows),
            self.ops.precision.dot(self.products, self.sharing.devices, context),
        )

    def _documents(self, rows: Tree) -> RowDocuments | None:
        """The documents of packed rows; raises `ValueError` where the batch lacks their keys."""
        if not self.ops.documents:
            return None
        if not {"segments", "positions"} <= rows.keys():
            raise ValueError(
                f"the model is built for packed rows, which have `segments` and `positions`, but "
                f"the batch has only {', '.join(rows)}: give both, or build it with documents=0."
            )
        return RowDocuments(rows["segments"], rows["positions"])

    def _cache(self, x: jax.Array, context: Context) -> Cache | None:
        """Keys and values of earlier slices; None without slices."""
        if self.sharing.slices == 1:
            return None
        return Cache(context.state, self._begin(context.rows, self._length(x)))

    def _begin(self, rows: Tree, length: int) -> jax.Array | int:
        """Number of the sequence's tokens in earlier slices."""
        if self.sharing.slices == 1:
            return 0
        return rows["slice"][0] * length * self.sharing.sequence.size

    @property
    def _embed_head_devices(self) -> OneDevice:
        return self.sharing.embed_head_devices or self.sharing.devices

    def _new_layer(self, kind: str, init: Init) -> nnx.Module:
        return self.new_layer(kind, LayerParts(self.sharing, self.ops), init)

    def _build_embed_head(self, init: Init) -> nnx.Module:
        return self.new_embed_head(EmbedHeadParts(self._embed_head_devices), init)

    @cached_property
    def _layers(self) -> dict[str, nnx.GraphDef]:
        return {kind: _graph(partial(self._new_layer, kind)) for kind in self.kinds}

    @cached_property
    def _embed_head_graph(self) -> nnx.GraphDef:
        return _graph(self._build_embed_head)


def _graph(module: Callable[[Init], nnx.Module]) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: module(init_from(jax.random.key(0)))))


def _values(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
