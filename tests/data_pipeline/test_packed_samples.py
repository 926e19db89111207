"""Rows of documents as samples: their arrays, padding, and sources without documents."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout import write

from jaxpipe.config import ConfigError, DataConfig
from jaxpipe.data.batches import DataSplit, training_order
from jaxpipe.data.packing import pack_documents
from jaxpipe.data.samples import JoinedSamples, PackedSamples
from jaxpipe.data.sources import RunData, open_data

L = 16


@dataclass(frozen=True)
class Listed:
    """Documents where token i of document d is 100 d + i; the first half of 3 does not count."""

    sizes: tuple[int, ...]
    fingerprint: str = "listed"

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array(self.sizes)

    def tokens(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        return np.arange(self.sizes[index], dtype=np.uint16)[begin:end] + 100 * index

    def counted(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray | None:
        whole = np.arange(self.sizes[index]) >= self.sizes[index] // 2
        return whole[begin:end] if index == 3 else None


SIZES = (5, 40, 1, 9, 2, 17, 4, 12, 30, 8)


def samples_of(how: str, most: int = 64, *, shared: bool = True) -> PackedSamples:
    documents = Listed(SIZES)
    return PackedSamples(documents, pack_documents(documents.lengths, L, how, most=most), shared)


@pytest.mark.parametrize("how", ["sequential", "best_fit"])
def test_every_target_stands_after_the_token_before_it_in_its_document(how: str) -> None:
    samples, seen = samples_of(how), []
    for index in range(len(samples)):
        sample = samples[index]
        assert {leaf.dtype for leaf in sample.values()} == {np.dtype(np.int32)}
        inputs, targets, segments, positions = (
            sample[name] for name in ("inputs", "targets", "segments", "positions")
        )
        known = targets != -100
        np.testing.assert_array_equal(targets[known], inputs[known] + 1)
        seen += targets[known].tolist()
        lengths = samples.documents_of(index)
        np.testing.assert_array_equal(segments, np.repeat(np.arange(len(lengths)), lengths))
        np.testing.assert_array_equal(positions, np.concatenate([*map(np.arange, lengths)]))
        for number in range(len(lengths)):
            assert (np.diff(inputs[segments == number]) == 1).all()  # one document, in order
    want = {100 * d + i for d, size in enumerate(SIZES) for i in range(1, size)}
    assert sorted(seen) == sorted(want - {301, 302, 303})  # those of the masked half


def batch_of(samples: PackedSamples, position: int = 0, **how: Any) -> dict[str, np.ndarray]:
    split = DataSplit("training", "", samples, training_order([len(samples)], [1.0], None))
    return split.batch(position, microbatches=2, batch_size=2, **how)


def test_rows_are_padded_to_the_longest_of_the_whole_step() -> None:
    """Every process finds this length, whatever rows it has."""
    documents, held = Listed((5, 9, 2, 12)), [4, 8, 1, 11]
    samples = PackedSamples(
        documents, pack_documents(documents.lengths, L, "sequential", most=1), False
    )
    asked = []

    def length_of(length: int) -> int:
        asked.append(length)
        return -(-length // 4) * 4

    whole = batch_of(samples, length_of=length_of)
    parts = [batch_of(samples, rows=slice(i, i + 1), length_of=length_of) for i in range(2)]
    assert asked == [11, 11, 11]
    assert whole.keys() == {"inputs", "targets", "real"}
    for name, leaf in whole.items():
        assert leaf.shape == (2, 2, 12)
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts], axis=1), leaf)
    for row, length in zip(whole["targets"].reshape(4, -1), held):
        assert (row[length:] == -100).all()
        assert row[length - 1] % 100 == length
    real = np.arange(12) < np.array(held)[:, None]
    np.testing.assert_array_equal(whole["real"].reshape(4, 12), real)


def test_padding_is_no_document() -> None:
    samples = samples_of("best_fit")
    batch = batch_of(samples, len(samples) - 4, length_of=lambda _: 24)
    padding = batch["segments"] == -1
    assert padding.sum() == 4 * 24 - sum(
        sum(samples.documents_of(i)) for i in range(len(samples) - 4, len(samples))
    )
    assert (batch["targets"][padding] == -100).all()
    assert not batch["inputs"][padding].any()
    assert not batch["positions"][padding].any()
    assert (np.diff(padding.astype(int)) >= 0).all()  # only at the end of rows


def test_contents_of_a_step_are_those_of_its_rows() -> None:
    one, other = samples_of("best_fit"), samples_of("sequential")
    joined = JoinedSamples([one, other])
    split = DataSplit("training", "", joined, training_order([len(one), len(other)], [1, 1], 5))
    contents = split.contents(3, 6)
    batch = split.batch(3, microbatches=3, batch_size=2, length_of=lambda _: L)
    held = (batch["segments"] >= 0).sum(axis=-1)
    assert (contents.rows, contents.tokens) == (6, held.sum())
    assert contents.longest == held.max()
    begins = ((batch["positions"] == 0) & (batch["segments"] >= 0)).sum()
    assert len(contents.documents) == begins


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 256, n).tolist()] for n in SIZES * 3]
    return write(tmp_path / "shard.bin", documents, "uint16")


def opened(path: Path, tmp_path: Path, seed: int = 7, **how: Any) -> RunData:
    variable = {"variable_length": how.pop("variable_length", False)}
    seq_len = how.pop("seq_len", L)
    config = DataConfig(**{"source": "file", "path": str(path)} | how)
    sizes = {"seq_len": seq_len, "vocab_size": 256, "seed": seed}
    return open_data(config, **sizes, directory=tmp_path / "data", **variable)


def test_fingerprints_tell_rows_of_the_same_documents_apart(shard: Path, tmp_path: Path) -> None:
    how = [
        {}, {"packing": "sequential"}, {"packing": "best_fit"}, {"variable_length": True},
        {"packing": "best_fit", "max_documents": 3}, {"packing": "best_fit", "seed": 8},
        {"packing": "sequential", "variable_length": True, "seq_len": 8},
    ]  # fmt: skip
    prints = [opened(shard, tmp_path, **one).train.fingerprint for one in how]
    assert len(set(prints)) == len(how)
    again = opened(shard, tmp_path, packing="best_fit").train.fingerprint
    assert again == prints[2]
    # The content of a row does not depend on the length of the step.
    same = opened(shard, tmp_path, packing="best_fit", variable_length=True).train.fingerprint
    assert same == prints[2]


def test_heldout_documents_are_packed_in_their_order(shard: Path, tmp_path: Path) -> None:
    data = opened(shard, tmp_path, packing="best_fit", heldout_fraction=0.4)
    pieces = [data.heldout.samples.packing.pieces(i) for i in range(len(data.heldout))]
    last = [row[-1].document for row in pieces]
    assert last == sorted(last)
    assert pieces[0][0].document == 0


def test_rows_of_one_document_have_no_segments(shard: Path, tmp_path: Path) -> None:
    data = opened(shard, tmp_path, variable_length=True)
    assert data.train.samples[0].keys() == {"inputs", "targets", "real"}
    assert all(len(data.train.samples.documents_of(i)) == 1 for i in range(len(data.train.samples)))


def test_made_up_samples_are_one_document_each(tmp_path: Path) -> None:
    made_up = DataConfig(source="dummy")
    data = open_data(made_up, seq_len=16, vocab_size=8, seed=0, directory=tmp_path)
    assert data.train.contents(5, 3).documents.tolist() == [16] * 3


def test_the_documents_of_the_standard_library_are_its_files(tmp_path: Path) -> None:
    data = open_data(
        DataConfig(packing="best_fit"), seq_len=512, vocab_size=256, seed=0, directory=tmp_path
    )
    documents = data.train.samples.documents
    texts = {bytes(documents.tokens(i).astype(np.uint8)) for i in range(len(documents.lengths))}
    import statistics

    assert Path(statistics.__file__).read_bytes() in texts
    tokens = int((documents.lengths - 1).sum())
    assert tokens / (len(data.train) * 512) > 0.99


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"packing": "best_fit"}, r"data\.packing makes .*flat\.npy is one row of tokens without"),
        ({"variable_length": True}, r"train\.variable_length makes .* without borders: prepare"),
        ({"packing": "sequential", "source": "dummy"}, r"data\.source='dummy' has none: choose"),
        ({"variable_length": True, "source": "dummy"}, r"train\.variable_length makes .*'dummy'"),
        ({"packing": "best_fit", "path": "ones"}, r"none in .*ones\.bin.* has two tokens"),
    ],
)
def test_nothing_to_tell_apart(tmp_path: Path, how: dict[str, Any], sentence: str) -> None:
    np.save(tmp_path / "flat.npy", np.arange(200, dtype=np.uint8))
    ones = write(tmp_path / "ones.bin", [[[5]]] * 40, "uint8")
    path = ones if how.pop("path", "") else tmp_path / "flat.npy"
    with pytest.raises(ConfigError, match=sentence):
        opened(path, tmp_path, **how)
