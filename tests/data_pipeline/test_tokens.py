"""Token files: every kind is read, and every fault is a clear error before the first step."""

from pathlib import Path

import numpy as np
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.samples import DummySamples, StreamSamples
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.data.shards.tokens import open_tokens

IDS = np.arange(1000) % 200


def all_ids(path: Path) -> np.ndarray:
    shard = open_tokens(path, 200, full_digest=True)
    return shard.read(0, shard.size)


def documents(ids: np.ndarray, directory: Path) -> ShardedDocuments:
    np.save(directory / "a.npy", ids)
    return open_documents(str(directory / "a.npy"), 1000)


def walk(samples: DummySamples, number: int) -> np.ndarray:
    sample = samples[number]
    np.testing.assert_array_equal(sample["inputs"][1:], sample["targets"][:-1])
    return np.append(sample["inputs"], sample["targets"][-1])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bin_is_read_by_its_sidecar(tmp_path: Path, dtype: str) -> None:
    IDS.astype(dtype).tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text(f'{{"dtype": "{dtype}", "tokenizer": "any"}}')
    np.testing.assert_array_equal(all_ids(tmp_path / "a.bin"), IDS)


def test_bin_without_sidecar_is_uint16(tmp_path: Path) -> None:
    IDS.astype("<u2").tofile(tmp_path / "a.bin")
    np.testing.assert_array_equal(all_ids(tmp_path / "a.bin"), IDS)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8", "<u8"])
def test_npy_of_every_integer_type(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", IDS.astype(dtype))
    np.testing.assert_array_equal(all_ids(tmp_path / "a.npy"), IDS)


@pytest.mark.parametrize("whole", [True, False])
def test_digest_follows_content_and_type(tmp_path: Path, whole: bool) -> None:
    changed = IDS.copy()
    changed[500] += 1
    versions = [IDS.astype("u2"), changed.astype("u2"), IDS.astype("u4"), IDS[:-1].astype("u2")]
    digests = []
    for ids in (*versions, versions[0]):
        np.save(tmp_path / "a.npy", ids)
        digests.append(open_tokens(tmp_path / "a.npy", 201, full_digest=whole).digest)
    assert len(set(digests)) == len(versions)
    assert digests[0] == digests[-1]


def test_split_keeps_every_token_once(tmp_path: Path) -> None:
    train, heldout = documents(IDS, tmp_path).split(0.05)
    both = [part.stream(0, len(part)) for part in (train, heldout)]
    np.testing.assert_array_equal(np.concatenate(both), IDS)
    assert len(heldout) == 50
    assert train.place.endswith("a.npy[:950]")
    assert heldout.place.endswith("a.npy[950:]")


def write_bin(path: Path, content: bytes, sidecar: str | None = None) -> Path:
    path.write_bytes(content)
    if sidecar is not None:
        path.with_suffix(".json").write_text(sidecar)
    return path


def write_npy(path: Path, array: np.ndarray, size: int | None = None) -> Path:
    np.save(path, array, allow_pickle=True)
    path.write_bytes(path.read_bytes()[:size])
    return path


FAULTS = {
    "suffix": (
        lambda d: write_bin(d / "a.txt", b"text"),
        r"ends in \.bin, \.npy, .* or \.parquet, unlike .*a\.txt:",
    ),
    "missing": (lambda d: d / "none.bin", r"none\.bin does not exist: correct"),
    "directory": (lambda d: d.rename(d.with_suffix(".bin")), r"unlike .*d\.bin and all that"),
    "empty bin": (lambda d: write_bin(d / "a.bin", b""), r"a\.bin is empty"),
    "empty npy": (lambda d: write_bin(d / "a.npy", b""), r"a\.npy is empty"),
    "odd": (lambda d: write_bin(d / "a.bin", b"abc"), r"3 bytes, not a multiple of the 2 .*uint16"),
    "odd by sidecar": (
        lambda d: write_bin(d / "a.bin", b"abcdef", '{"dtype": "uint32"}'),
        r"6 bytes, not a multiple of the 4 bytes of a uint32: it is truncated, or a\.json",
    ),
    "float sidecar": (
        lambda d: write_bin(d / "a.bin", b"abcd", '{"dtype": "float32"}'),
        r"a\.json gives the type of the tokens in .*a\.bin .* 'float32'",
    ),
    "broken sidecar": (lambda d: write_bin(d / "a.bin", b"abcd", '{"dt'), r"truncated\): correct"),
    "zip": (
        lambda d: write_bin(d / "a.bin", b"PK\x03\x04" + bytes(60)),
        r"a\.bin should be bare ids, but it is a zip archive, as",
    ),
    "LitGPT": (
        lambda d: write_bin(d / "a.bin", b"LITPKDS" + bytes(65)),
        r"a\.bin should be bare ids, but it is a packed file of LitGPT",
    ),
    "LitData": (
        lambda d: [write_bin(d / n, b"\1\0" * 9) for n in ("index.json", "chunk-0-0.bin")][1],
        r"chunk-0-0\.bin should be bare ids, but it is a chunk of LitData",
    ),
    "truncated": (
        lambda d: write_npy(d / "a.npy", IDS, -1),
        r"a\.npy is truncated, or not a \.npy",
    ),
    "header only": (lambda d: write_npy(d / "a.npy", IDS, 20), r"a\.npy is truncated, or "),
    "not npy": (lambda d: write_bin(d / "a.npy", b"text" * 99), r"a\.npy is truncated, or "),
    "objects": (lambda d: write_npy(d / "a.npy", np.array([{}])), r"a\.npy is truncated, or "),
    "2-D": (lambda d: write_npy(d / "a.npy", IDS.reshape(2, -1)), r"has shape \(2, 500\)"),
    "floats": (lambda d: write_npy(d / "a.npy", IDS / 1), r"dtype float64: flatten it, or convert"),
    "booleans": (lambda d: write_npy(d / "a.npy", IDS > 1), r"dtype bool"),
    "negative": (lambda d: write_npy(d / "a.npy", IDS - 1), r"has -1 at position 0 and .* is 199"),
    "too large": (lambda d: write_npy(d / "a.npy", IDS), r"has 199 at position 199 and .* is 199:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_sentences(tmp_path: Path, fault: str) -> None:
    write, sentence = FAULTS[fault]
    (tmp_path / "d").mkdir()
    path = write(tmp_path / "d")
    with pytest.raises(ConfigError, match=sentence) as caught:
        open_documents(str(path), 199)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_an_id_is_found_beyond_the_first_chunk(tmp_path: Path) -> None:
    ids = np.zeros((1 << 20) + 7, np.uint16)
    ids[[5, -2]] = 9, 10
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(ConfigError, match=f"has 10 at position {len(ids) - 2} "):
        open_tokens(tmp_path / "a.npy", 10, full_digest=True)


@pytest.mark.parametrize(("tokens", "samples"), [(4, 1), (6, 1), (7, 2), (1000, 333)])
def test_samples_overlap_by_one_token(tokens: int, samples: int, tmp_path: Path) -> None:
    cut = StreamSamples(documents(np.arange(tokens), tmp_path), 3)
    assert len(cut) == samples
    for i in range(samples):
        np.testing.assert_array_equal(cut[i]["inputs"], 3 * i + np.arange(3))
        np.testing.assert_array_equal(cut[i]["targets"], 3 * i + np.arange(1, 4))


@pytest.mark.parametrize("tokens", [1, 3])
def test_too_few_tokens_for_a_sample(tokens: int, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"seq_len \+ 1 = 4 tokens, but .*a\.npy has {tokens}: use"
    ):
        StreamSamples(documents(np.arange(tokens), tmp_path), 3)


@pytest.mark.parametrize("vocab_size", [1, 4, 97])
def test_dummy_samples_are_functions_of_seed_and_number(vocab_size: int) -> None:
    samples = DummySamples(5, vocab_size, 16, range(10, 30))
    walks = np.stack([walk(samples, i) for i in range(20)])
    assert walks.shape == (20, 17)
    assert walks.min() >= 0
    assert walks.max() < vocab_size
    shifted = DummySamples(5, vocab_size, 16, range(29, 30))
    np.testing.assert_array_equal(walk(shifted, 0), walks[-1])
    steps = np.diff(walks) % vocab_size
    assert set(np.unique(steps)) <= {step % vocab_size for step in (1, 2, 3, 4)}


def test_dummy_samples_differ_by_seed() -> None:
    one, two = (walk(DummySamples(seed, 97, 16, range(1)), 0) for seed in (1, 2))
    assert (one != two).any()
