"""Batches: which samples a step takes, in an order that is the same on every machine.

The order is a function of (seed, position) alone, where position counts the samples taken so far.
Sample (m, b) of a step is number `position + m * B + b` of the order, whatever dp, pp and the
number of processes, of which each makes the rows that its devices take. M microbatches, B examples
in one microbatch over all dp ranks, L tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import grain
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.samples import PADDING, Sample, Samples
from jaxpipe.model.loss import IGNORE

Batch = dict[str, np.ndarray]
LengthOf = Callable[[int], int]  # L of a step, from the tokens of its longest row

_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches


def training_order(
    samples: Sequence[int], weights: Sequence[float], seed: int | None
) -> grain.MapDataset[int]:
    """Endless order of the samples of several sources, mixed in the proportion of their weights.

    `samples` is how many each has; their numbers follow on each other. Every epoch of a source has
    each of its N samples once, in another order with another seed; with seed None 0, 1, ..., N-1.
    """
    # The order of the first is that of a run which has no other.
    seeds = [seed, *np.random.SeedSequence(seed or 0).generate_state(len(samples) - 1).tolist()]
    orders = _ranges(samples)
    if seed is not None:
        orders = [order.seed(own).shuffle() for order, own in zip(orders, seeds)]
    return _mixed([order.repeat() for order in orders], weights)


def heldout_order(samples: Sequence[int], weights: Sequence[float]) -> grain.MapDataset[int]:
    """Each of N samples of a source once: 0, 1, ..., N-1; of several until one of them ends."""
    return _mixed(_ranges(samples), weights)


def _ranges(samples: Sequence[int]) -> list[grain.MapDataset[int]]:
    return [grain.MapDataset.range(*ends) for ends in pairwise(accumulate(samples, initial=0))]


def _mixed(
    orders: Sequence[grain.MapDataset[int]], weights: Sequence[float]
) -> grain.MapDataset[int]:
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


@dataclass(frozen=True)
class Contents:
    """What the rows of a step hold, those of all processes: a function of (seed, position) alone.

    `documents` has the tokens of each, as far as they are inputs; no padding is among them.
    """

    rows: int
    longest: int  # tokens of a row
    documents: np.ndarray

    @property
    def tokens(self) -> int:
        """Those that are no padding."""
        return int(self.documents.sum())


class Source(NamedTuple):
    """What a split has of one source."""

    place: str
    samples: int  # in one epoch
    share: float  # of the samples of the split


@dataclass(frozen=True)
class Split:
    """The training or the held-out samples, in order.

    Equal fingerprints mean equal samples in equal order: with one, a position says which is next.
    """

    name: str  # "training" or "held-out"
    fingerprint: str
    samples: Samples
    order: grain.MapDataset[int]  # indices into samples; longer than them if endless
    # the same by a digest of whole files, which takes reading them: older checkpoints hold it
    whole_fingerprint: Callable[[], str] | None = None
    sources: tuple[Source, ...] = ()  # that are mixed
    masked: bool = False  # whether some targets may not count in the loss

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        return min(len(self.samples), len(self.order))

    def has(self, fingerprint: str) -> bool:
        """Whether a fingerprint, perhaps of an older checkpoint, is that of these samples."""
        if fingerprint == self.fingerprint or self.whole_fingerprint is None:
            return fingerprint == self.fingerprint
        return fingerprint == self.whole_fingerprint()

    def without_target(self, most: int = 64) -> tuple[int, int]:
        """How many of the first samples in order have no target that counts, and of how many."""
        looked = min(most, len(self)) if self.masked else 0
        targets = (self.samples[self.order[at]]["targets"] for at in range(looked))
        return sum(bool((one == IGNORE).all()) for one in targets), looked

    def contents(self, position: int, step: int) -> Contents:
        """What the `step` samples from a position on hold, as their index tells: nothing is read.

        Every process finds the same, so none has to ask the others for the longest.
        """
        return self._contents(position, step)

    @cached_property
    def _contents(self) -> Callable[[int, int], Contents]:
        def of(position: int, step: int) -> Contents:
            numbers = map(self._number_at, range(position, position + step))
            found = list(map(self.samples.documents_of, numbers))
            return Contents(step, max(map(sum, found)), np.concatenate(found))

        return lru_cache(maxsize=128)(of)

    def batch(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None),
        length_of: LengthOf | None = None,
    ) -> Batch:  # fmt: skip
        """`inputs`, `targets`, ..., int32 `[M, B, L]`, of the step that starts at a position.

        `batch_size` is B of the whole step; `rows` picks examples of each microbatch, so that the
        batches of all rows, joined on the second dim, are the batch of the step. Where samples
        differ in length, `length_of` makes L of that of the step's longest. Held-out samples that
        end within the batch are followed by rows without targets, copies of the last one.

        Raises `IndexError` where held-out samples run out before it, `ConfigError` where their
        files turn out to be faulty.
        """
        step = microbatches * batch_size
        if position >= len(self.order):
            raise IndexError(
                f"no {microbatches} x {batch_size} samples at position {position}: the {self.name} "
                f"data has {len(self)}."
            )
        taken = [
            [self._sample_at(position + m * batch_size + b) for b in range(batch_size)[rows]]
            for m in range(microbatches)
        ]
        if length_of is not None:
            length = length_of(self.contents(position, step).longest)
            taken = [[_padded(sample, length) for sample in row] for row in taken]
        return {
            name: np.stack([[sample[name] for sample in row] for row in taken])
            for name in taken[0][0]
        }

    def batches(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None),
        length_of: LengthOf | None = None,
    ) -> grain.DatasetIterator[Batch]:  # fmt: skip
        """Batches from a position on, read ahead in threads; `close()` ends these.

        Training batches never end. Held-out ones have every sample once, the last of them with rows
        that count for nothing where it needs more samples. The arguments are those of `batch`.

        Raises `ConfigError` where one batch to train on takes more samples than there are, or where
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
            length_of=length_of,
        )  # fmt: skip
        end = len(self.order) - step + 1 if endless else len(self.order)
        starts = grain.MapDataset.range(position, end, step)
        return iter(starts.map(read).to_iter_dataset(_PREFETCH))

    def _number_at(self, position: int) -> int:
        """The number of the sample there; after the last one its own again."""
        return self.order[min(position, len(self.order) - 1)]

    def _sample_at(self, position: int) -> Sample:
        """The sample there; after the last one that without targets."""
        sample = self.samples[self._number_at(position)]
        if position < len(self.order):
            return sample
        return sample | {"targets": np.full_like(sample["targets"], PADDING["targets"])}


def _padded(sample: Sample, length: int) -> Sample:
    """A sample as a row of so many tokens."""
    return {
        name: np.pad(leaf, (0, length - len(leaf)), constant_values=PADDING[name])
        for name, leaf in sample.items()
    }
