"""Shards on disk."""

import numpy as np

from jaxpipe.data.prepare.writing import DocumentBatch, write_shard


def test_the_mask_has_a_bit_for_each_token_of_all_batches(tmp_path) -> None:
    """Batches end within a byte of the mask."""
    rng = np.random.default_rng(0)
    counted = [rng.integers(0, 2, tokens).astype(bool) for tokens in (3, 5, 6, 1, 20)]
    batches = (DocumentBatch(np.arange(len(one)), np.array([len(one)]), one) for one in counted)
    entry, _ = write_shard(tmp_path, "shard", np.dtype("<u2"), batches)
    bits = np.fromfile(tmp_path / "shard.mask", np.uint8)
    every = np.concatenate(counted)
    np.testing.assert_array_equal(np.unpackbits(bits, count=35, bitorder="little"), every)
    assert (len(bits), entry.tokens, entry.counted) == (5, 35, every.sum())
