"""Batches: which samples a step takes, in an order that is the same on every machine.

The order is a function of (seed, position) alone, where position counts the samples taken so far.
Sample (m, b) of a step is number `position + m * B + b` of the order, whatever dp, pp and the
number of processes, of which each makes the rows that its devices take. M microbatches, B examples
in one microbatch over all dp ranks, L tokens.
"""

from dataclasses import dataclass
from functools import partial

import grain
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.samples import Samples

Batch = dict[str, np.ndarray]

_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # batches


def training_order(samples: int, seed: int | None) -> grain.MapDataset[int]:
    """Endless order: every epoch has each of N samples once, in another order with another seed.

    With seed None every epoch is 0, 1, ..., N-1.
    """
    order = grain.MapDataset.range(samples)
    return (order if seed is None else order.seed(seed).shuffle()).repeat()


def heldout_order(samples: int) -> grain.MapDataset[int]:
    """Each of N samples once: 0, 1, ..., N-1."""
    return grain.MapDataset.range(samples)


@dataclass(frozen=True)
class Split:
    """The training or the held-out samples, in order.

    Equal fingerprints mean equal samples in equal order: with one, a position says which is next.
    """

    name: str  # "training" or "held-out"
    fingerprint: str
    samples: Samples
    order: grain.MapDataset[int]  # indices into samples; longer than them if endless

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        return len(self.samples)

    def batch(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None)
    ) -> Batch:
        """`inputs` and `targets`, int32 `[M, B, L]`, of the step that starts at a position.

        `batch_size` is B of the whole step; `rows` picks examples of each microbatch, so that the
        batches of all rows, joined on the second dim, are the batch of the step.

        Raises `IndexError` where held-out samples run out.
        """
        if position + microbatches * batch_size > len(self.order):
            raise IndexError(
                f"no {microbatches} x {batch_size} samples at position {position}: the {self.name} "
                f"data has {len(self)}."
            )
        indices_MB = np.array(
            [
                [self.order[position + m * batch_size + b] for b in range(batch_size)[rows]]
                for m in range(microbatches)
            ]
        )
        samples_MBL = self.samples[indices_MB].astype(np.int32)
        return {"inputs": samples_MBL[..., :-1], "targets": samples_MBL[..., 1:]}

    def batches(
        self, position: int, *, microbatches: int, batch_size: int, rows: slice = slice(None)
    ) -> grain.DatasetIterator[Batch]:
        """Batches from a position on, read ahead in threads; `close()` ends these.

        Training batches never end. Held-out ones stop with the last whole batch, so no sample
        counts twice. The arguments are those of `batch`.

        Raises `ConfigError` where one batch takes more samples than there are.
        """
        step = microbatches * batch_size
        if step > len(self):
            raise ConfigError(
                f"a batch takes {microbatches} microbatches x {batch_size} samples = {step}, but "
                f"the {self.name} data has {len(self)}: use more data, or a smaller "
                f"train.grad_accum_steps, train.microbatch_size or train.seq_len."
            )
        read = partial(self.batch, microbatches=microbatches, batch_size=batch_size, rows=rows)
        starts = grain.MapDataset.range(position, len(self.order) - step + 1, step)
        return iter(starts.map(read).to_iter_dataset(_PREFETCH))
