"""Estimate of packing efficiency from the length histogram in a prepared folder's manifest."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpipe.config import Config, ConfigError, DataConfig
from jaxpipe.data.packing import count_slots, pack_documents
from jaxpipe.data.shards.manifest import HistogramBin, read_manifest
from jaxpipe.planning import Estimate

_MOST = 1 << 20  # limit on documents in the sample


@dataclass(frozen=True)
class PackingEstimate:
    """Estimated content of packed rows.

    Attributes:
      efficiency: share of the rows' tokens that is not padding.
      documents: documents, or pieces of long ones, in a sample, by their length in slots.
    """

    efficiency: float
    documents: Counter[int]


def estimate_packing(folder: Path, config: DataConfig, seq_len: int) -> PackingEstimate:
    """Pack a sample with the folder's distribution of lengths into rows of `seq_len` tokens.

    Raises `ConfigError` without a manifest, a document of two tokens, or packing.
    """
    manifest = read_manifest(folder)
    if config.packing == "none":
        raise ConfigError(
            f"the lengths of the documents in {folder} count where rows are packed, but "
            f"data.packing='none': set it to best_fit or sequential."
        )
    lengths = np.random.default_rng(0).permutation(sample_lengths(manifest.histogram))
    packing = pack_documents(lengths, seq_len, config.packing, most=config.max_documents)
    wholes, rests = np.divmod(count_slots(lengths), seq_len)
    documents = Counter(rests[rests > 0].tolist())
    documents[seq_len] += int(wholes.sum())
    tokens = int(count_slots(lengths).sum())
    if not tokens:
        raise ConfigError(f"no document in {folder} has two tokens, an input and its target.")
    return PackingEstimate(tokens / (len(packing) * seq_len), documents)


def sample_lengths(histogram: tuple[HistogramBin, ...]) -> np.ndarray:
    """Return document lengths in a histogram's proportions, spread evenly about each bin's mean.

    >>> sample_lengths((HistogramBin(8, 2, 14), HistogramBin(20, 1, 20)))
    array([ 6,  8, 20])
    """
    every = max(1.0, sum(bar.documents for bar in histogram) / _MOST)
    parts = [np.zeros(0, int)]
    for bar in histogram:
        mean, count = bar.tokens / bar.documents, round(bar.documents / every)
        spread = (np.arange(count) + 0.5) / max(count, 1) * 2 - 1
        parts.append(np.rint(mean + spread * min(bar.up_to - mean, mean - 1)).astype(int))
    return np.concatenate(parts)


def describe_packing(config: Config, rows: PackingEstimate, best: Estimate, peak: float) -> str:
    """Describe how packed documents change tokens/s and MFU of the recommended schedule.

    Args:
      config: of the run.
      rows: expected packing efficiency and lengths of documents.
      best: the recommended schedule.
      peak: of a device, FLOP/s.
    """
    tokens = sum(length * count for length, count in rows.documents.items())
    flops = config.model.flops_of_documents(rows.documents) / tokens
    flops -= config.model.frozen_flops(config.lora.rank)
    mfu = best.tokens_per_second / config.parallel.devices * flops / peak
    return (
        f"packed ({config.data.packing}): {rows.efficiency:.2%} of the rows is no padding, and "
        f"only that is in tokens/s; {best.label}: MFU {mfu:.1%}, attention counted as "
        f"long as documents are."
    )
