"""Transfer of host batches to the devices: which rows a process reads, and their sharding."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.mesh import batch_spec, shard_batch
from jaxpipe.data.balance import RowBalance
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.neighbours import neighbour_keys, neighbour_rows
from jaxpipe.training.argument_checks import check_position
from jaxpipe.training.batch_checks import SAMPLES, check_batch, dtype_of


@dataclass(frozen=True)
class BatchSharder:
    """Shards batches `[M, B, L]` over a mesh.

    Attributes:
      config: the run's configuration.
      mesh: the mesh to put batches on.
      keys: names of the arrays that the model reads (`StageFunctions.batch_keys`); None: any.
    """

    config: Config
    mesh: Mesh
    keys: tuple[str, ...] | None = None

    @property
    def numbered(self) -> bool:
        """Whether training batches contain the numbers of their samples, `samples`."""
        return SAMPLES in (self.keys or ())

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of every array of a batch."""
        return NamedSharding(self.mesh, batch_spec())

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays of a training batch."""
        packed = ("segments", "positions") if self.config.data.documents else ()
        real = (REAL,) if self.config.marks_padding else ()
        neighbours = neighbour_keys(self.config.model)
        numbers = (SAMPLES,) if self.numbered else ()
        return ("inputs", "targets", *packed, *real, *neighbours, *numbers, *self.config.loss_rows)

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
        names = [name for name in self.leaves if trains or name != SAMPLES]
        shape = (*self.config.batch_shape.values(), length)
        rows = {name: _zeros(self.config, name, shape) for name in names}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding)
            for name, leaf in jax.eval_shape(self.shard, rows).items()
        }

    def put(self, batch: Mapping[str, Any], position: int | None = None) -> dict[str, jax.Array]:
        """Put a host batch on the devices.

        Args:
          batch: arrays `[M, B, L]` by name, of the full batch or of this process's rows
            (`check_batch`).
          position: number in the run of the first sample, by which dropout draws its masks; None:
            `samples` of the batch, or no numbers, for a model without dropout and for `eval_step`.

        Raises:
          ConfigError: an array is not as the configuration and the model need it.
        """
        rows, size = self.rows(), self.config.batch_shape["batch_size"]
        batch = check_batch(batch, self.config, self.keys, rows.stop - rows.start)
        check_position(position)
        if self.keys is not None and REAL not in self.keys:
            batch.pop(REAL, None)  # without experts nothing reads what it marks
        batch |= neighbour_rows(batch, self.config.model)
        microbatches, own, length = batch["inputs"].shape
        first = 0 if own == size else rows.start
        if position is not None and SAMPLES in batch:
            raise ConfigError(
                f"the batch has {SAMPLES}, and position={position} numbers them too: give one."
            )
        if position is not None and self.numbered:
            numbers = position + np.arange(microbatches)[:, None] * size + first + np.arange(own)
            of_tokens = (numbers % 2**31).astype(np.int32)[..., None]
            batch[SAMPLES] = np.broadcast_to(of_tokens, (microbatches, own, length))
        return {name: self._placed(leaf, own, first) for name, leaf in self.shard(batch).items()}

    def check_placed(self, batch: Mapping[str, Any], *, trains: bool) -> None:
        """Raise `ConfigError` where a batch on devices is not as `put` shards one for a step.

        `trains` is that of `check_numbered`, which is checked, too.
        """
        self.check_numbered(batch, trains=trains)
        want = self.shapes(self.config.train.seq_len, trains=trains)["inputs"].shape[:2]
        for name, leaf in batch.items():
            if np.shape(leaf)[:2] != want:
                raise ConfigError(
                    f"{name} of the batch is {list(np.shape(leaf))} on the devices, where a step "
                    f"reads {[*want]} rows: put it there by trainer.put, which checks and shards "
                    f"it; train.fused_steps are for FusedSteps.train_steps."
                )

    def check_numbered(self, batch: Mapping[str, Any], *, trains: bool) -> None:
        """Raise `ConfigError` where a step has no sample numbers to drop by, or an evaluation has.

        `trains` says which of the two the batch is for.
        """
        if trains and self.numbered and SAMPLES not in batch:
            raise ConfigError(
                f"dropout draws its masks by the numbers of samples, but the batch has only "
                f"{', '.join(batch)}: give the number of its first sample in the run as "
                f"trainer.put(batch, position), such as step * trainer.samples_per_step, or "
                f"`{SAMPLES}` [M, B, L] in the batch."
            )
        if not trains and SAMPLES in batch:
            raise ConfigError(
                f"an evaluation drops nothing, but the batch has {SAMPLES}, by which dropout draws "
                f"its masks: leave them out, and put the batch without a position."
            )

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

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # of a device of this process
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
    batch |= {name: _zeros(config, name, (*sizes, length)) for name in config.loss_rows}
    if config.marks_padding:
        batch[REAL] = np.ones_like(batch["inputs"])
    if not config.data.documents:
        return batch
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (*sizes, length))
    return batch | {"segments": np.zeros_like(positions), "positions": positions}


def _zeros(config: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros of an array of a batch `[M, B, L]`, which take no memory."""
    dims = (*shape, *config.loss_rows.get(name, ()))
    return np.broadcast_to(dtype_of(name, config).type(0), dims)
