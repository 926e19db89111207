"""Values in float64 and batches, with which a wrong step cannot look right."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import Config
from jaxpipe.model.family import Model
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import CHOICES, IGNORE

Tree = Any
Batch = dict[str, np.ndarray]
_FACTOR = 5  # on initial matrices, so that every sublayer changes the stream noticeably


def float64_values(model: Model, config: Config) -> tuple[Tree, list[Tree], Tree]:
    """Return the full parameters of embedding and head, of every layer, and the variables.

    They are the initial values with larger matrices, and no vector or variable of floats is
    constant; variables of integers, such as numbers of experts, are as they are.
    """
    key = jax.random.key(config.train.seed)
    kinds = model.functions.layer_kinds(config.model.pipeline_layers)
    layers = [_uneven(model.init_layer(key, i, kind)) for i, kind in enumerate(kinds)]
    variables = jax.tree.map(
        lambda leaf: 0.2 * _wave(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        model.functions.variables,
    )
    return jax.device_get((_uneven(model.init_embed_head(key)), layers, variables))


def _uneven(tree: Tree) -> Tree:
    def change(leaf: jax.Array) -> jax.Array:
        wave = 0.1 * _wave(leaf)
        is_matrix = leaf.ndim > 1 and bool(leaf.any())  # others are biases, or adapters' zeros
        return (_FACTOR if is_matrix else 1) * leaf.astype(jnp.float64) + (not is_matrix) * wave

    return jax.tree.map(change, tree)


def _wave(leaf: Any) -> jax.Array:
    """Different values of the shape of `leaf`."""
    return jnp.sin(1.0 + jnp.arange(leaf.size)).reshape(leaf.shape)


def batch_of(config: Config, step: int) -> Batch:
    """Return the host batch `[M, B, L]` of a step; no two microbatches have as many targets.

    Some targets are ignored. Rows of varying length end in padding, and packed rows hold several
    documents, as in `CausalDecoder`.
    """
    rng, sizes = np.random.default_rng(step), tuple(config.batch_shape.values())
    longest = config.train.seq_len
    if config.train.variable_length:
        longest = longest // 2 + 1
    length = config.length_of(longest)
    tokens = rng.integers(0, config.model.vocab_size, (*sizes, length + 1), np.int32)
    inputs, targets = tokens[..., :-1], tokens[..., 1:].copy()
    ignored = rng.random(targets.shape) < 0.1 + 0.4 * rng.random((sizes[0], 1, 1))
    ignored[..., 1] = False  # every row has a target
    targets[ignored] = IGNORE
    batch = {"inputs": inputs, "targets": targets}
    for name, dims in config.loss_rows.items():
        shape = (*targets.shape, *dims)
        ids = name == CHOICES
        batch[name] = (
            rng.integers(0, config.model.vocab_size, shape, np.int32)
            if ids
            else rng.standard_normal(shape)
        )
    if not config.pads:
        return batch
    held = rng.integers(longest // 2, longest, sizes)
    held[0, 0] = longest
    real = np.arange(length) < held[..., None]
    targets[~real] = IGNORE
    if not config.data.documents:
        return batch | ({REAL: real.astype(np.int32)} if config.marks_padding else {})
    return _packed(batch, real, config.data.documents, rng)


def _packed(batch: Batch, real: np.ndarray, most: int, rng: np.random.Generator) -> Batch:
    """Divide the real tokens of every row into at most `most` documents."""
    segments = np.full(real.shape, -1, np.int32)
    positions, targets = np.zeros_like(segments), batch["targets"]
    for index in np.ndindex(real.shape[:2]):
        length = int(real[index].sum())
        cuts = np.sort(rng.choice(np.arange(1, length), min(most, length) - 1, replace=False))
        bounds = [0, *cuts.tolist(), length] if index != (0, 0) else [0, length]
        for number, (begin, end) in enumerate(pairwise(bounds)):
            segments[index][begin:end] = number
            positions[index][begin:end] = np.arange(end - begin)
            targets[index][end - 1] = IGNORE
    return batch | {"segments": segments, "positions": positions, "targets": targets}


def documents_as_rows(batch: Batch) -> Batch:
    """Return every document of packed rows as a row of its own, padded at its end.

    A causal model ignores the padding, and its targets are ignored. Each row gives as many rows as
    the fullest row has documents.
    """
    microbatches, examples, length = batch["inputs"].shape
    most = int(batch["segments"].max()) + 1
    shape = (microbatches, examples, most, length)
    rows = {"inputs": np.zeros(shape, np.int32), "targets": np.full(shape, IGNORE, np.int32)}
    for index in np.ndindex(shape[:3]):
        document = batch["segments"][index[:2]] == index[2]
        for name, leaf in rows.items():
            leaf[index][: document.sum()] = batch[name][index[:2]][document]
    return {name: leaf.reshape(microbatches, -1, length) for name, leaf in rows.items()}
