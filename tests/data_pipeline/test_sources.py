"""From a configuration to data: each source, its splits and its fingerprints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import layout
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxpipe.config import ConfigError, DataConfig, SourceConfig
from jaxpipe.data.shards import token_files
from jaxpipe.data.sources import RunData, open_data
from jaxpipe.data.warnings import data_warnings

SIZES = {"seq_len": 16, "vocab_size": 1000, "seed": 7}
SHAPE = {"microbatches": 2, "batch_size": 4}


def tokens_of(data: RunData, position: int = 0) -> np.ndarray:
    return data.train.batch(position, **SHAPE)["inputs"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a thousand distinct tokens, in text order."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    return path


@pytest.mark.parametrize("source", ["stdlib", "dummy", "file"])
def test_every_source_opens_the_same_twice(file: Path, tmp_path: Path, source: Any) -> None:
    config = DataConfig(source=source, path=str(file))
    one, two = (open_data(config, **SIZES, directory=tmp_path / "data") for _ in range(2))
    assert one.train.fingerprint == two.train.fingerprint != one.heldout.fingerprint
    np.testing.assert_array_equal(tokens_of(one, 99), tokens_of(two, 99))
    for split in (one.train, one.heldout):
        batch = split.batch(0, microbatches=1, batch_size=2)
        assert {array.shape for array in batch.values()} == {(1, 2, 16)}
        assert len(split) >= 3


def test_file_and_dummy_write_nothing(file: Path, tmp_path: Path) -> None:
    for config in (DataConfig(source="dummy"), DataConfig(source="file", path=str(file))):
        open_data(config, **SIZES, directory=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def all_ids(data: RunData) -> tuple[set[int], set[int]]:
    train, heldout = (
        np.unique([[*split.samples[i].values()] for i in range(len(split))])
        for split in (data.train, data.heldout)
    )
    return set(train.tolist()), set(heldout.tolist())


def test_no_token_of_a_file_is_in_both_splits(file: Path, tmp_path: Path) -> None:
    config = DataConfig(source="file", path=str(file), heldout_fraction=0.2)
    train, heldout = all_ids(open_data(config, **SIZES, directory=tmp_path))
    assert train == set(range(785))  # 49 samples of the first 800 tokens
    assert heldout == set(range(800, 993))


def test_heldout_file(file: Path, tmp_path: Path) -> None:
    (np.arange(40, dtype=np.uint16) + 500).tofile(tmp_path / "heldout.bin")
    heldout_path = str(tmp_path / "heldout.bin")
    config = DataConfig(source="file", path=str(file), heldout_path=heldout_path)
    train, heldout = all_ids(open_data(config, **SIZES, directory=tmp_path))
    assert train == set(range(993))
    assert heldout == set(range(500, 533))


def test_dummy_splits_are_of_other_numbers(tmp_path: Path) -> None:
    data = open_data(DataConfig(source="dummy"), **SIZES, directory=tmp_path)
    one, two = (split.samples.numbers for split in (data.train, data.heldout))
    assert one.stop == two.start
    assert len(two) / (len(one) + len(two)) == pytest.approx(0.05, abs=1e-6)


def test_heldout_is_not_shuffled_and_training_is(file: Path, tmp_path: Path) -> None:
    config = DataConfig(source="file", path=str(file), heldout_fraction=0.5)
    data = open_data(config, **SIZES, directory=tmp_path)
    heldout = data.heldout.batch(0, **SHAPE)["inputs"][..., 0].ravel()
    np.testing.assert_array_equal(heldout, 500 + 16 * np.arange(8))
    assert (np.diff(tokens_of(data)[..., 0].ravel()) != 16).any()


def test_shuffle_can_be_off(file: Path, tmp_path: Path) -> None:
    config = DataConfig(source="file", path=str(file), shuffle=False)
    data = open_data(config, **SIZES, directory=tmp_path)
    np.testing.assert_array_equal(tokens_of(data)[..., 0].ravel(), 16 * np.arange(8))


def test_fingerprint_notices_what_changes_the_samples(file: Path, tmp_path: Path) -> None:
    def fingerprint(sizes: dict[str, int], **data: Any) -> str:
        config = DataConfig(source="file", path=str(file), **data)
        return open_data(config, **{**SIZES, **sizes}, directory=tmp_path).train.fingerprint

    first = fingerprint({})
    assert first == fingerprint({"vocab_size": 2000})
    others = {
        fingerprint({"seq_len": 8}),
        fingerprint({"seed": 8}),
        fingerprint({}, shuffle=False),
        fingerprint({}, heldout_fraction=0.1),
    }
    np.save(file, np.arange(1000, dtype=np.uint16)[::-1])
    others.add(fingerprint({}))
    assert len(others | {first}) == 6


def test_another_order_of_the_same_content_is_noticed(file: Path, tmp_path: Path) -> None:
    """As a new numpy or grain may draw it; checkpoints from before it was recorded still fit."""
    config = DataConfig(source="file", path=str(file))
    split = open_data(config, **SIZES, directory=tmp_path).train
    content, order = split.fingerprint.split(" order=")
    assert split.has(split.fingerprint)
    assert split.has(content)
    assert len(order) == 8
    drawn = list(split.order[:100])
    other = replace(split, order=[drawn[1], drawn[0], *drawn[2:]])
    assert not other.has(split.fingerprint)
    assert other.has(content)


def test_a_large_file_is_known_by_parts_of_it_and_by_its_older_fingerprint(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(source="file", path=str(file))
    whole = open_data(config, **SIZES, directory=tmp_path)
    monkeypatch.setattr(token_files, "FULL_DIGEST_BYTES", 1999)
    parts = open_data(config, **SIZES, directory=tmp_path)
    assert parts.train.fingerprint != whole.train.fingerprint
    for split, other in ((parts.train, whole.train), (parts.heldout, whole.heldout)):
        assert split.has(split.fingerprint)
        assert split.has(other.fingerprint)
        assert other.has(other.fingerprint)
        assert not other.has(split.fingerprint)
        assert not split.has(f"{other.fingerprint}0")
    np.testing.assert_array_equal(tokens_of(parts, 99), tokens_of(whole, 99))
    ids = np.load(file)
    ids[500] = 0
    np.save(file, ids)
    assert not open_data(config, **SIZES, directory=tmp_path).train.has(whole.train.fingerprint)


def sources_of(*sources: tuple[Path, float], **data: Any) -> DataConfig:
    tables = tuple(SourceConfig(path=str(path), weight=weight) for path, weight in sources)
    return DataConfig(sources=tables, **data)


def test_sources_are_mixed_and_each_is_held_out_in_part(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, np.full(2000, 5))
    config = sources_of((file, 1), (other, 3), (tmp_path / "none.bin", 0), heldout_fraction=0.2)
    data = open_data(config, **SIZES, directory=tmp_path)
    assert len(data.train) == 49 + 99
    firsts = data.train.batch(0, microbatches=5, batch_size=8)["inputs"][..., 0]
    assert (firsts == 5).mean() == pytest.approx(0.75, abs=0.03)
    train, heldout = all_ids(data)
    assert train == {5, *range(785)}
    assert heldout - {5} < set(range(800, 1000))
    assert len(heldout) > 100

    def fingerprint(*sources: tuple[Path, float]) -> str:
        return open_data(sources_of(*sources), **SIZES, directory=tmp_path).train.fingerprint

    same = fingerprint((file, 2), (other, 6))
    assert same == fingerprint((file, 1), (other, 3))
    assert same != fingerprint((file, 1), (other, 1))
    assert same != fingerprint((other, 3), (file, 1))


def test_one_source_is_a_path(file: Path, tmp_path: Path) -> None:
    one = open_data(sources_of((file, 3)), **SIZES, directory=tmp_path)
    config = DataConfig(source="file", path=str(file))
    path = open_data(config, **SIZES, directory=tmp_path)
    assert one.train.fingerprint == path.train.fingerprint
    np.testing.assert_array_equal(tokens_of(one, 99), tokens_of(path, 99))


def test_several_sources_have_one_heldout_path(file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "heldout.npy", np.full(99, 7))
    other = tmp_path / "other.npy"
    np.save(other, np.load(file))
    config = sources_of((file, 1), (other, 1), heldout_path=str(tmp_path / "heldout.npy"))
    data = open_data(config, **SIZES, directory=tmp_path)
    assert (len(data.train), all_ids(data)[1]) == (2 * 62, {7})


def copied(file: Path, to: Path, how: str) -> Path:
    """Copy or link the tokens under another name."""
    match how:
        case "link":
            to.symlink_to(file)
        case "hard link":
            to.hardlink_to(file)
        case "copy":
            to.write_bytes(file.read_bytes())
        case _:
            return file
    return to


@pytest.mark.parametrize("how", ["same", "link", "hard link", "copy", "folder", "pattern"])
def test_what_is_held_out_is_not_trained_on(file: Path, tmp_path: Path, how: str) -> None:
    heldout = copied(file, tmp_path / "heldout.npy", how)
    paths = {"folder": str(tmp_path), "pattern": f"{tmp_path}/*.npy"}
    config = DataConfig(source="file", path=paths.get(how, str(file)), heldout_path=str(heldout))
    with pytest.raises(ConfigError, match=r"names .*\.npy, which is also trained on.*: take"):
        open_data(config, **SIZES, directory=tmp_path)
    config = sources_of((file, 1), heldout_path=str(heldout))
    with pytest.raises(ConfigError, match=r"also trained on"):
        open_data(config, **SIZES, directory=tmp_path)


@pytest.mark.parametrize("how", ["same", "link", "hard link", "folder"])
def test_a_file_is_trained_on_once(file: Path, tmp_path: Path, how: str) -> None:
    other = tmp_path if how == "folder" else copied(file, tmp_path / "other.npy", how)
    with pytest.raises(ConfigError, match=r"\.npy is to be trained on twice, also as"):
        open_data(sources_of((file, 1), (other, 1)), **SIZES, directory=tmp_path)
    if "link" in how:  # in one folder
        config = DataConfig(source="file", path=str(tmp_path))
        with pytest.raises(ConfigError, match=r"is to be trained on twice"):
            open_data(config, **SIZES, directory=tmp_path)


def test_a_source_that_is_repeated_often_is_told(file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.npy"
    np.save(small, np.arange(7 * 16 + 1))
    np.save(tmp_path / "heldout.npy", np.full(99, 7))
    config = sources_of((file, 1), (small, 1), heldout_path=str(tmp_path / "heldout.npy"))
    train = open_data(config, **SIZES, directory=tmp_path).train
    (sentence,) = data_warnings(train, 400)  # 200 samples of 62, and of 7
    assert f"takes 29 epochs of the 7 samples of {small}" in sentence
    assert not [*data_warnings(train, 56)]


@pytest.mark.parametrize("packing", ["none", "sequential", "best_fit"])
def test_samples_without_targets_are_told(tmp_path: Path, packing: Any) -> None:
    """Documents of 65 tokens; only the last 8 count."""
    labels = [*[-100] * 57, *range(57, 65)]
    table = pyarrow.table({"input_ids": [[*range(65)]] * 8, "labels": [labels] * 8})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    layout.write(tmp_path / "heldout.bin", [[[*range(40)]]], "uint16")
    heldout = str(tmp_path / "heldout.bin")
    config = DataConfig(
        source="file", path=str(tmp_path / "a.parquet"), heldout_path=heldout, packing=packing
    )
    data = open_data(config, **SIZES, directory=tmp_path)
    targets = [data.train.samples[i]["targets"] for i in range(len(data.train))]
    empty = sum((one == -100).all() for one in targets)
    assert data.train.count_without_target() == (empty, len(targets))
    assert 16 <= empty < 32
    assert f"{empty} of the first 32 samples have no target" in next(data_warnings(data.train, 32))
    assert data.heldout.count_without_target() == (0, 0)


def test_stdlib_fingerprint_follows_the_text(tmp_path: Path) -> None:
    config = DataConfig(source="stdlib", heldout_fraction=0.05)
    one = open_data(config, **SIZES, directory=tmp_path)
    config = DataConfig(source="stdlib", heldout_fraction=0.06)
    two = open_data(config, **SIZES, directory=tmp_path)
    assert one.train.fingerprint != two.train.fingerprint


@pytest.mark.parametrize(
    ("data", "sizes", "sentence"),
    [
        ({"source": "file", "path": "none.bin"}, {}, r"none\.bin does not exist"),
        ({"source": "file", "heldout_path": "none.bin"}, {}, r"none\.bin does not exist"),
        ({"source": "file"}, {"vocab_size": 999}, r"has 999 at position 999 and .* is 999"),
        (
            {"source": "file", "heldout_fraction": 0.96},
            {"seq_len": 50},
            r"= 51 tokens, but .*tokens\.npy\[:40\] has 40",
        ),
        ({"source": "file"}, {"seq_len": 50}, r"= 51 tokens, but .*tokens\.npy\[950:\] has 50"),
        ({"source": "stdlib"}, {"vocab_size": 100}, "is bytes, 0..255, but model.vocab_size=100"),
    ],
)
def test_faults_are_sentences(
    file: Path, tmp_path: Path, data: dict[str, Any], sizes: dict[str, int], sentence: str
) -> None:
    config = DataConfig(**{"path": str(file), **data})
    with pytest.raises(ConfigError, match=sentence):
        open_data(config, **{**SIZES, **sizes}, directory=tmp_path / "data")
