"""Batches: the samples of every step, in an order that is the same on every mesh.

The order is a function of (seed, position) alone, where position counts the samples taken so far.
Sample (m, b) of a step is number `position + m * B + b` of the order, for any dp, pp and number of
processes, unless a `RowBalance` permutes the samples of each step. Each process builds only the
rows of its own devices. Dims: M microbatches, B examples of one microbatch over all data-parallel
replicas, L tokens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, Protocol

import grain
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.balance import RowBalance
from jaxpipe.data.read_ahead import ReadAhead
from jaxpipe.data.samples import PADDING, Sample, TokenSamples
from jaxpipe.model.loss import IGNORE
from jaxpipe.runtime.storage.errors import retry

Batch = dict[str, np.ndarray]

LengthOf = Callable[[int], int]  # L of a step, given the number of tokens of its longest row

_ORDER = " order="
_DIGESTED, _DIGESTED_ROWS = 1000, 16  # numbers and samples in the digest of an order
_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # [batches]


def training_order(
    samples: Sequence[int], weights: Sequence[float], seed: int | None
) -> grain.MapDataset[int]:
    """Return the endless training order: sources mixed in proportion to their weights.

    Args:
      samples: number of samples of each source; sources are numbered one after the other.
      weights: relative share of each source.
      seed: each epoch of a source has each of its N samples once, in another order, which depends
        on the seed; None: 0, 1, ..., N-1 in every epoch.
    """
    # The first source uses the seed itself, so its order is the same as in a run without others.
    seeds = [seed, *np.random.SeedSequence(seed or 0).generate_state(len(samples) - 1).tolist()]
    orders = _source_ranges(samples)
    if seed is not None:
        orders = [order.seed(order_seed).shuffle() for order, order_seed in zip(orders, seeds)]
    return _mix_orders([order.repeat() for order in orders], weights)


def heldout_order(samples: Sequence[int], weights: Sequence[float]) -> grain.MapDataset[int]:
    """Return the held-out order: each sample of one source once, or a mix until a source ends."""
    return _mix_orders(_source_ranges(samples), weights)


def _source_ranges(samples: Sequence[int]) -> list[grain.MapDataset[int]]:
    return [grain.MapDataset.range(*ends) for ends in pairwise(accumulate(samples, initial=0))]


def _mix_orders(
    orders: Sequence[grain.MapDataset[int]], weights: Sequence[float]
) -> grain.MapDataset[int]:
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


@dataclass(frozen=True)
class DocumentLengths:
    """Document lengths in the rows of a step, over all processes, from (seed, position) alone.

    Attributes:
      rows: rows of the step, M * B.
      longest: tokens of the longest row.
      documents: input tokens of every document, integers `[documents]`, without padding.
    """

    rows: int
    longest: int
    documents: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of input tokens of the step without padding."""
        return int(self.documents.sum())


class Batches(Iterator[Batch], Protocol):
    """An iterator over batches, whose threads `close` ends."""

    def close(self) -> None:
        """End the threads."""


class SourceSamples(NamedTuple):
    """One source of a split."""

    place: str  # its path, for messages
    samples: int  # samples in one epoch
    share: float  # fraction of the split's samples that come from this source


@dataclass(frozen=True)
class DataSplit:
    """The training or the held-out samples, in order.

    Equal fingerprints mean equal samples in equal order, so a fingerprint and a position identify
    the next sample.
    """

    name: str  # "training" or "held-out"
    content: str  # identifies the samples and, with the same numpy and grain, their order
    samples: TokenSamples
    order: grain.MapDataset[int]  # indices into samples; longer than `samples` if endless
    # Computes the content from a digest of the full files, which reads all of them; older
    # checkpoints store this form.
    whole_content: Callable[[], str] | None = None
    sources: tuple[SourceSamples, ...] = ()  # the sources that are mixed
    masked: bool = False  # whether some targets may be excluded from the loss
    warnings: tuple[str, ...] = ()  # for the log

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        return min(len(self.samples), len(self.order))

    def has(self, fingerprint: str) -> bool:
        """Whether a fingerprint, perhaps from an older checkpoint, belongs to these samples."""
        content, _, order = fingerprint.partition(_ORDER)
        if order not in ("", self._order_digest):  # older checkpoints have none
            return False
        if content == self.content or self.whole_content is None:
            return content == self.content
        return content == self.whole_content()

    @cached_property
    def fingerprint(self) -> str:
        """String that identifies the samples and their order."""
        return f"{self.content}{_ORDER}{self._order_digest}"

    @cached_property
    def _order_digest(self) -> str:
        """Digest of the order's beginning, which is drawn by numpy and grain.

        Neither promises the same numbers in all versions.
        """
        order = [int(self.order[at]) for at in range(min(_DIGESTED, len(self.order)))]
        rows = [self.samples[number]["inputs"].tobytes() for number in order[:_DIGESTED_ROWS]]
        drawn = np.array(order, "<i8").tobytes() + b"".join(rows)
        return hashlib.blake2b(drawn, digest_size=4).hexdigest()

    def count_without_target(self) -> tuple[int, int]:
        """Count the samples without any target in the loss among the first 64 of the order.

        Returns the count and the number of samples that were read.
        """
        looked = min(64, len(self)) if self.masked else 0
        targets = (self.samples[self.order[at]]["targets"] for at in range(looked))
        return sum(bool((one == IGNORE).all()) for one in targets), looked

    @cached_property
    def contents(self) -> Callable[[int, int], DocumentLengths]:
        """A function of a position and a number of samples from there on: document lengths.

        It reads no tokens. Every process computes the same result, so finding the longest row needs
        no communication.
        """

        def of(position: int, step: int) -> DocumentLengths:
            documents = retry(
                lambda: list(self._documents(position, step)), f"the {self.name} data"
            )
            return DocumentLengths(step, max(map(sum, documents)), np.concatenate(documents))

        return lru_cache(maxsize=128)(of)

    def _documents(self, position: int, step: int) -> Iterator[list[int]]:
        """Yield the tokens of each document in each of the `step` samples from a position on."""
        numbers = map(self._number_at, range(position, position + step))
        return map(self.samples.documents_of, numbers)

    def batch(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None),
        length_of: LengthOf | None = None, balance: RowBalance | None = None,
    ) -> Batch:  # fmt: skip
        """Return `inputs`, `targets`, ..., int32 `[M, B, L]`, for the step at a position.

        Args:
          position: number of samples before the step.
          microbatches: M.
          batch_size: B of the full step.
          rows: the examples of each microbatch to return; the batches of disjoint slices,
            concatenated on the second dim, are the batch of the step.
          length_of: where samples differ in length, computes L from the longest row of the step.
          balance: permutes the samples of the step; None: they are in order.

        Where held-out samples end within the batch, it is filled with copies of the last sample
        without targets.

        Raises:
          IndexError: where held-out samples end before this position.
          ConfigError: where a token file is faulty.
        """
        step = microbatches * batch_size
        if position >= len(self.order):
            raise IndexError(
                f"no {microbatches} x {batch_size} samples at position {position}: the {self.name} "
                f"data has {len(self)}."
            )
        places = np.arange(step).reshape(microbatches, batch_size)
        if balance is not None:
            places = balance.places(self._documents(position, step), microbatches)
        taken = [
            [self._sample_at(position + place) for place in row] for row in places[:, rows].tolist()
        ]
        if length_of is not None:
            length = length_of(self.contents(position, step).longest)
            taken = [[_pad_sample(sample, length) for sample in row] for row in taken]
        return {
            name: np.stack([[sample[name] for sample in row] for row in taken])
            for name in taken[0][0]
        }

    def batches(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None),
        length_of: LengthOf | None = None, balance: RowBalance | None = None,
    ) -> Batches:  # fmt: skip
        """Iterate over batches from a position on, read ahead in threads; `close()` ends them.

        Training batches never end, and are a `ReadAhead`. Held-out batches contain every sample
        once; the last batch may be filled with rows without targets. The arguments are those of
        `batch`.

        Raises `ConfigError` where a training batch needs more samples than one epoch has, or where
        there are none.
        """
        step, endless = microbatches * batch_size, len(self.order) > len(self.samples)
        if (step if endless else 1) > len(self):
            raise ConfigError(
                f"a batch takes {microbatches} microbatches x {batch_size} samples = {step}, but "
                f"the {self.name} data has {len(self)}: use more data, or a smaller "
                f"train.grad_accum_steps, train.microbatch_size or train.seq_len."
            )
        read = partial(
            self.batch, microbatches=microbatches, batch_size=batch_size, rows=rows,
            length_of=length_of, balance=balance,
        )  # fmt: skip
        end = len(self.order) - step + 1 if endless else len(self.order)

        def read_surely(position: int) -> Batch:
            return retry(lambda: read(position), f"the {self.name} data")

        starts = grain.MapDataset.range(position, end, step)
        batches = iter(starts.map(read_surely).to_iter_dataset(_PREFETCH))
        return ReadAhead(batches) if endless else batches

    def _number_at(self, position: int) -> int:
        """Return the sample number at a position; after the end, the last sample's number."""
        return self.order[min(position, len(self.order) - 1)]

    def _sample_at(self, position: int) -> Sample:
        """Return the sample at a position; after the end, the last sample without targets."""
        sample = self.samples[self._number_at(position)]
        if position < len(self.order):
            return sample
        return sample | {"targets": np.full_like(sample["targets"], PADDING["targets"])}


def join_batches(batches: Iterator[Batch], steps: int) -> Batch:
    """The batches of the next `steps` steps, concatenated along the microbatches."""
    first, *others = islice(batches, steps)
    if not others:
        return first
    return {
        name: np.concatenate([leaf, *(o[name] for o in others)]) for name, leaf in first.items()
    }


def _pad_sample(sample: Sample, length: int) -> Sample:
    """Pad a sample to a row of `length` tokens."""
    return {
        name: np.pad(leaf, (0, length - len(leaf)), constant_values=PADDING.get(name, 0))
        for name, leaf in sample.items()
    }
