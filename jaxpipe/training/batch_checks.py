"""Checks of host batches: every array has the configured shape and dtype, and values that exist."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import Config, ConfigError
from jaxpipe.model.layers.moe.balance import REAL, ROUTES
from jaxpipe.model.loss import CHOICES, IGNORE
from jaxpipe.model.neighbours import neighbour_keys

Batch = dict[str, np.ndarray]
SAMPLES = "samples"  # batch key of the numbers of a row's sample in the run, which dropout needs


def check_batch(
    given: Mapping[str, Any], config: Config, keys: Sequence[str] | None, own: int
) -> Batch:
    """Return the arrays of a batch, in the dtypes that a step reads.

    Args:
      given: arrays `[M, B, L]` by name; `routes` and some rows of a loss have further dims.
      config: the run's configuration.
      keys: names of the arrays that the model reads; None: any.
      own: the sequences of each microbatch that this process reads, a valid B besides the full one.

    Raises `ConfigError` where an array is missing, unknown, or has another shape or dtype; where
    tokens, documents, routes, sample numbers or positions do not exist; where rows should be packed
    or should mark their padding, but do not.
    """
    _check_names(given, config, keys)
    batch = {name: _as_array(name, leaf, config) for name, leaf in given.items()}
    _check_shape(batch["inputs"], config, own)
    for name, leaf in batch.items():
        _check_like_inputs(name, leaf, batch["inputs"], config)
    _check_ids(batch, config.model.vocab_size)
    _check_documents(batch, config.data.documents)
    real = _real_tokens(batch)
    _check_positions(batch, real, config.model.max_seq_len)
    if CHOICES in batch:
        _check_choices(batch[CHOICES], batch["targets"] != IGNORE, config.model.vocab_size)
    if ROUTES in batch:
        _check_routes(batch[ROUTES], real, config.model.routed_experts)
    if SAMPLES in batch:
        _check_samples(batch[SAMPLES])
    return batch


def _check_names(given: Mapping[str, Any], config: Config, keys: Sequence[str] | None) -> None:
    """Check that `inputs` and `targets` are there, and that every array is read."""
    check_mapping(given)
    if missing := [name for name in ("inputs", "targets") if name not in given]:
        raise ConfigError(
            f"the batch has no {missing[0]!r}, only {', '.join(given)}: give integers [M, B, L]."
        )
    if config.marks_padding and REAL not in given:
        raise ConfigError(
            f"rows of train.variable_length may end in padding, which no expert takes, but the "
            f"batch has only {', '.join(given)}: give `real`, 1 at tokens and 0 at padding."
        )
    computed = ("slice", *neighbour_keys(config.model))
    reads = [name for name in keys or given if name not in computed]
    if not config.data.documents and REAL not in reads:  # without experts it is checked alone
        reads.append(REAL)
    if unknown := [name for name in given if name not in reads]:
        raise ConfigError(
            f"the batch has an array {unknown[0]!r} that this model does not read: leave it out; "
            f"it reads {', '.join(reads)}."
        )


def dtype_of(name: str, config: Config) -> np.dtype:
    """The dtype of an array of a batch; float rows of a loss may be wider."""
    is_float = name in config.loss_rows and name != CHOICES
    return np.dtype(np.float32 if is_float else np.int32)


def _as_array(name: str, leaf: Any, config: Config) -> np.ndarray:
    """The array in its dtype; check that it has numbers of this kind."""
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(
            f"{name} of the batch is traced, but a batch is checked on the host: put it on the "
            f"devices outside of jax.jit, and trace `Trainer.step` alone."
        )
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise ConfigError(f"{name} of the batch is no array: {error}.") from error
    dtype = dtype_of(name, config)
    is_real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.integer, jnp.floating))
    fits = is_real if dtype.kind == "f" else jnp.issubdtype(array.dtype, jnp.integer)
    if not fits and not (name == REAL and array.dtype == bool):
        raise ConfigError(
            f"{name} of the batch is {array.dtype}{list(array.shape)}, but is read as {dtype}: "
            f"give {'numbers' if dtype.kind == 'f' else 'integers'}."
        )
    if dtype.kind == "f" and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if dtype.kind == "i" and not np.array_equal(array, array.astype(dtype)):
        raise ConfigError(f"{name} of the batch has values beyond int32: give int32.")
    return array.astype(dtype, copy=False)


def _check_shape(inputs: np.ndarray, config: Config, own: int) -> None:
    """Check M, B and L against the configuration."""
    train, (microbatches, sequences) = config.train, config.batch_shape.values()
    longest, unit = train.seq_len, config.sequence_shards * train.loss_chunks
    steps = {microbatches, microbatches * train.fused_steps}
    if inputs.ndim == 3 and inputs.shape[0] in steps and inputs.shape[1] in (sequences, own):
        length = inputs.shape[2]
        if length == longest:
            return
        if train.variable_length and 0 < length < longest and length % unit == 0:
            return
    part = f", or B={own}, the part of this process" if own != sequences else ""
    lengths = f", or L a multiple of {unit} below" if train.variable_length else ""
    raise ConfigError(
        f"inputs of the batch are {list(inputs.shape)}, but the configuration asks for [M, B, L] = "
        f"{[microbatches, sequences, longest]}{part}{lengths}: give rows of that shape (padded, "
        f"with targets of {IGNORE}), or set M by train.grad_accum_steps, B by "
        f"train.microbatch_size (of each replica) and L by train.seq_len, or shorter L by "
        f"train.variable_length."
    )


def _check_like_inputs(name: str, leaf: np.ndarray, inputs: np.ndarray, config: Config) -> None:
    """Check that an array has the shape of `inputs`, with its own further dims."""
    model, further = config.model, config.loss_rows.get(name, ())
    if name == CHOICES and not further:  # of scores: any number of them
        further = leaf.shape[3:4] or (1,)
    if name == ROUTES:
        further = (len(model.sparse_layers), model.experts_per_token)
    if leaf.shape == (*inputs.shape, *further):
        return
    dims = ", its [M, B, L]" + (f" and {list(further)} of its own" if further else "")
    if name == REAL:
        dims += ", 1 at tokens and 0 at padding"
    if name == ROUTES:
        dims = ", [M, B, L, layers with experts, experts_per_token]; prediction heads are layers"
    raise ConfigError(
        f"{name} of the batch is {leaf.dtype}{list(leaf.shape)}, but with inputs "
        f"{list(inputs.shape)} it must be {[*inputs.shape, *further]}{dims}."
    )


def _check_ids(batch: Batch, vocab_size: int) -> None:
    """Check that tokens are in the vocabulary; a target may be `IGNORE`."""
    for name, least in (("inputs", 0), ("targets", IGNORE)):
        ids = batch[name]
        wrong = (ids >= vocab_size) | ((ids < 0) & (ids != least))
        if wrong.any():
            place = _first(wrong)
            ignored = f", or {IGNORE} where a target is left out" if least else ""
            raise ConfigError(
                f"{name} {place} of the batch is {ids[place]}: tokens are 0 to {vocab_size - 1} "
                f"with model.vocab_size={vocab_size}{ignored}."
            )


def _check_documents(batch: Batch, most: int) -> None:
    """Check that documents are contiguous, at most `most` per row, with positions that count up.

    Attention kernels rely on it and would mix documents silently. Positions of padding are free.
    """
    if not most:
        return
    if not {"segments", "positions"} <= batch.keys():
        raise ConfigError(
            f"rows are to be packed, but the batch has only {', '.join(batch)}: give `segments` "
            f"and `positions`, or set data.packing=none."
        )
    segments, positions = batch["segments"], batch["positions"]
    if (held := int(segments.max()) + 1) > most:
        raise ConfigError(
            f"a row holds {held} documents, but data.max_documents={most}: raise it, or pack fewer."
        )
    order = np.where(segments < 0, most, segments)
    begins, goes_on = (np.diff(order, prepend=-1) == step for step in (1, 0))
    counted = np.diff(positions, prepend=0) == 1
    wrong = (order < most) & ~np.where(begins, positions == 0, goes_on & counted)
    if wrong.any():
        place = _first(wrong)
        raise ConfigError(
            f"token {place} of the batch is of document {segments[place]} at position "
            f"{positions[place]}, which does not follow from the token before it: documents of a "
            f"row are 0, 1, ... and contiguous, positions count from 0 in each, -1 is padding at "
            f"the end."
        )


def _real_tokens(batch: Batch) -> np.ndarray:
    """Mask of the tokens that are not padding; check that `real` agrees with the targets."""
    if "segments" in batch:
        return batch["segments"] >= 0
    if REAL not in batch:
        return np.ones(batch["inputs"].shape, bool)
    real, counts = batch[REAL], batch["targets"] != IGNORE
    for wrong, why in (
        ((real != 0) & (real != 1), "1 marks a token and 0 padding"),
        ((real == 0) & counts, f"the target of padding must be {IGNORE}, which does not count"),
    ):
        if wrong.any():
            place = _first(wrong)
            raise ConfigError(f"{REAL} {place} of the batch is {real[place]}: {why}.")
    return real == 1


def _check_positions(batch: Batch, real: np.ndarray, most: int) -> None:
    """Check that positions of tokens are among the model's; `most` 0: any from 0 on."""
    if "positions" not in batch:
        return
    positions = batch["positions"]
    wrong = real & ((positions < 0) | (positions >= (most or math.inf)))
    if wrong.any():
        place = _first(wrong)
        known = f"are 0 to {most - 1} with model.max_seq_len={most}" if most else "count from 0"
        raise ConfigError(
            f"positions {place} of the batch is {positions[place]}: positions of tokens {known}."
        )


def _check_choices(choices: np.ndarray, counts: np.ndarray, vocab_size: int) -> None:
    """Check that choices are in the vocabulary; at targets that do not count they are free."""
    wrong = counts[..., None] & ((choices < 0) | (choices >= vocab_size))
    if wrong.any():
        place = _first(wrong)
        raise ConfigError(
            f"{CHOICES} {place} of the batch is {choices[place]}: tokens are 0 to {vocab_size - 1} "
            f"with model.vocab_size={vocab_size}."
        )


def _check_routes(routes: np.ndarray, real: np.ndarray, experts: int) -> None:
    """Check that every token has a choice of different experts; that of padding is free."""
    ordered = np.sort(routes, axis=-1)
    exists = (ordered >= 0) & (ordered < experts)
    differ = (np.diff(ordered, axis=-1) > 0).all(-1)
    wrong = real[..., None] & ~(exists.all(-1) & differ)
    if wrong.any():
        place = _first(wrong)
        raise ConfigError(
            f"routes {place} of the batch are {routes[place].tolist()}, but every token chooses "
            f"{routes.shape[-1]} different experts of 0 to {experts - 1} in every layer with "
            f"experts (padding is free, where `real` or `segments` marks it): record the choice of "
            f"all tokens, by BatchScores.record_routes, or leave routes out."
        )


def _check_samples(samples: np.ndarray) -> None:
    """Check that a row has one number."""
    wrong = (samples != samples[..., :1]) | (samples < 0)
    if wrong.any():
        place = _first(wrong)
        raise ConfigError(
            f"{SAMPLES} {place} of the batch is {samples[place]}: every row has one number from 0 "
            f"on, repeated for its tokens; or give `put` the number of the first sample instead."
        )


def check_mapping(batch: Any) -> None:
    """Check that a batch has arrays by name."""
    if not isinstance(batch, Mapping):
        raise ConfigError(f"the batch is a {type(batch).__name__}: give a dict of arrays by name.")


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(wrong)[0]))
