"""Warnings about the data, logged before a run starts."""

from collections.abc import Iterator

from jaxpipe.data.batches import DataSplit

# Up to four epochs of repeated data are about as good as new data (Muennighoff et al. 2023, Scaling
# Data-Constrained Language Models, arXiv:2305.16264).
_MOST_EPOCHS = 4


def data_warnings(train: DataSplit, samples: int) -> Iterator[str]:
    """Yield warnings for sources repeated too often in a run of `samples`, and wasted samples."""
    yield from train.warnings
    for place, size, share in train.sources:
        epochs = samples * share / size
        if epochs > _MOST_EPOCHS:
            yield f"warning: the run takes {epochs:,.0f} epochs of the {size:,} samples of {place}"
    without, looked = train.count_without_target()
    if without:
        yield (
            f"warning: {without} of the first {looked} samples have no target that counts, so they "
            f"teach nothing: a larger train.seq_len or data.packing may join them with others"
        )
