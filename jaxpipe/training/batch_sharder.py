"""Transfer of host batches to the devices: which rows a process reads, and their sharding."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe.config import Config, ConfigError
from jaxpipe.data.balance import RowBalance
from jaxpipe.model.ahead import ahead_keys, rows_ahead
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.moe.balance import REAL
from jaxpipe.parallel import batch_spec, shard_batch


@dataclass(frozen=True)
class BatchSharder:
    """Shards batches `[M, B, L]` over a mesh.

    Attributes:
      config: the run's configuration.
      mesh: the mesh to put batches on.
      numbered: whether training batches contain the numbers of their samples, `samples`.
    """

    config: Config
    mesh: Mesh
    numbered: bool

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of every array of a batch."""
        return NamedSharding(self.mesh, batch_spec())

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays of a training batch."""
        packed = ("segments", "positions") if self.config.data.documents else ()
        real = (REAL,) if self.config.marks_padding else ()
        ahead = ahead_keys(self.config.model.tokens_ahead)
        numbers = ("samples",) if self.numbered else ()
        return ("inputs", "targets", *packed, *real, *ahead, *numbers, *self.config.loss_rows)

    def rows(self, process: int | None = None) -> slice:
        """The examples of each microbatch that a process reads; None: this process.

        They are the examples of all replicas from its first to its last. Replicas that share a
        sequence (context parallelism) all read the full sequence.
        """
        process = jax.process_index() if process is None else process
        of_process = np.vectorize(lambda device: device.process_index == process)
        pp, *replicas, tp = self.mesh.devices.shape
        here = of_process(self.mesh.devices).reshape(pp, math.prod(replicas), tp).any(axis=(0, 2))
        groups = np.flatnonzero(here) // self.config.parallel.cp
        each = self.config.train.microbatch_size
        return slice(int(groups.min()) * each, (int(groups.max()) + 1) * each)

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of `DataSplit.batches`: batch shape, this process's rows, length, balance."""
        config = self.config
        more: dict[str, Any] = {"length_of": config.length_of} if config.pads else {}
        if config.data.balance_rows:
            attention = cache(config.model.attention_flops)
            more["balance"] = RowBalance(config.train.microbatch_size, attention)
        return {**config.batch_shape, "rows": self.rows(), **more}

    def shapes(self, length: int, *, trains: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch with `length` tokens per row, by name.

        `trains` False: of a batch for `eval_step`, which has no sample numbers.
        """
        shape = (*self.config.batch_shape.values(), length)
        ids, floats = (np.broadcast_to(zero, shape) for zero in (np.int32(0), np.float32(0)))
        names = [name for name in self.leaves if trains or name != "samples"]
        rows = {name: floats if name in self.config.loss_rows else ids for name in names}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding)
            for name, leaf in jax.eval_shape(self.shard, rows).items()
        }

    def put(self, batch: dict[str, Any], position: int | None = None) -> dict[str, jax.Array]:
        """Put a host batch on the devices.

        Args:
          batch: arrays `[M, B, L]` by name, of the full batch or of this process's rows.
          position: number in the run of the first sample; None: for `eval_step`, without numbers.

        Raises:
          ConfigError: a token is outside the vocabulary, rows should be packed but are not,
            documents of packed rows are not as the model needs them, or rows have padding that
            experts could not tell.
        """
        _check_ids(batch, self.config.model.vocab_size)
        _check_documents(batch, self.config.data.documents)
        batch = self._with_known_padding(batch)
        batch |= rows_ahead(batch, self.config.model.tokens_ahead)
        microbatches, own, length = batch["inputs"].shape
        size = self.config.batch_shape["batch_size"]
        first = 0 if own == size else self.rows().start
        if position is not None and self.numbered:
            numbers = position + np.arange(microbatches)[:, None] * size + first + np.arange(own)
            numbers = (numbers % 2**31).astype(np.int32)[..., None]
            batch = batch | {"samples": np.broadcast_to(numbers, (microbatches, own, length))}
        return {name: self._placed(leaf, own, first) for name, leaf in self.shard(batch).items()}

    def _with_known_padding(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with `real` (1 at tokens, 0 at padding) only if experts need it."""
        if REAL in self.leaves and REAL not in batch:
            raise ConfigError(
                f"rows of train.variable_length may end in padding, which no expert takes, but the "
                f"batch has only {', '.join(batch)}: give `real`, 1 at tokens and 0 at padding."
            )
        return {name: leaf for name, leaf in batch.items() if name != REAL or name in self.leaves}

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Split arrays `[M, B, L]` into sequence slices and order them by sequence shard."""
        parallel = self.config.parallel
        own = next(iter(batch.values())).shape[1]
        dp = parallel.dp * own // self.config.batch_shape["batch_size"]
        heads = parallel.exchanging
        return shard_batch(batch, slices=parallel.slices, cp=parallel.cp, dp=dp, heads=heads)

    def restore(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Undo `shard`: values of a batch as devices return them, in the order `[M, B, L, ...]`."""
        places, of_token = np.arange(math.prod(shape)).reshape(shape), values.shape[len(shape) :]
        whole = np.empty((places.size, *of_token), values.dtype)
        whole[self.shard({"inputs": places})["inputs"]] = values
        return whole.reshape(*shape, *of_token)

    def _placed(self, leaf: np.ndarray, own: int, first: int) -> jax.Array:
        """The global array; `leaf` holds the rows of `own` examples from example `first` on."""
        of_example = leaf.shape[1] // own
        whole = of_example * self.config.batch_shape["batch_size"]
        begin = of_example * first

        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows = index[1].indices(whole)
            return leaf[index[0], rows[0] - begin : rows[1] - begin, *index[2:]]

        shape = (leaf.shape[0], whole, *leaf.shape[2:])
        return jax.make_array_from_callback(shape, self.sharding, part)


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Random tokens `[M, B, L]` of a step, independent of the mesh; int32, fixed seed.

    Packed rows have one document each.
    """
    sizes, length = config.batch_shape.values(), config.train.seq_len
    shape = (*sizes, length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    batch = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}
    batch |= dict.fromkeys(config.loss_rows, np.zeros((*sizes, length), np.float32))
    if config.marks_padding:
        batch[REAL] = np.ones_like(batch["inputs"])
    if not config.data.documents:
        return batch
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (*sizes, length))
    return batch | {"segments": np.zeros_like(positions), "positions": positions}


def _check_ids(batch: dict[str, np.ndarray], vocab_size: int) -> None:
    """Check that tokens are in the vocabulary; a target may be `IGNORE`."""
    for name, least in (("inputs", 0), ("targets", IGNORE)):
        ids = batch[name]
        wrong = (ids >= vocab_size) | ((ids < 0) & (ids != least))
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            ignored = f", or {IGNORE} where a target is left out" if least else ""
            raise ConfigError(
                f"{name} {place} of the batch is {ids[place]}: tokens are 0 to {vocab_size - 1} "
                f"with model.vocab_size={vocab_size}{ignored}."
            )


def _check_documents(batch: dict[str, np.ndarray], most: int) -> None:
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
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ConfigError(
            f"token {place} of the batch is of document {segments[place]} at position "
            f"{positions[place]}, which does not follow from the token before it: documents of a "
            f"row are 0, 1, ... and contiguous, positions count from 0 in each, -1 is padding at "
            f"the end."
        )
