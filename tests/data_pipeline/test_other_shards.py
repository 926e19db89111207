"""Shards of datatrove, OLMo and Fast-LLM, written here by struct and numpy as these write them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.token_files import open_documents

DOCUMENTS = [[5, 6, 7], [8, 9], [], [2, 3, 4, 1]]
IDS, LENGTHS = np.concatenate(DOCUMENTS).astype(int), np.array([3, 2, 0, 4])
# Spans of tokens that do not count, by document, and what therefore counts.
SPANS = [[(0, 1)], [], [], [(1, 2), (3, 4)]]
COUNTED = [False, True, True, True, True, True, False, True, False]


def check(path: Path, counted: list[bool] | None) -> None:
    documents = open_documents(str(path), 10)
    assert documents.lengths.tolist() == [3, 2, 4]
    assert documents.stream(0, 9).tolist() == IDS.tolist()
    assert documents.tokens(2).tolist() == DOCUMENTS[3]
    assert documents.split(0.3)[1].begin == 5
    for begin, end in ((0, 9), (1, 4), (6, 7), (7, 9), (8, 9)):
        part = documents.counted_in_stream(begin, end)
        assert (None if part is None else part.tolist()) == (counted and counted[begin:end])


def write_ds(path: Path, dtype: str = "<u2", line: str | None = "gpt2|2", loss: Any = None) -> Path:
    IDS.astype(dtype).tofile(path)
    np.cumsum(LENGTHS).astype("<u8").tofile(f"{path}.index")
    if line is not None:
        Path(f"{path}.metadata").write_text(f"{line}\n9\n9 T")
    if loss is not None:
        np.array(loss, bool).tofile(f"{path}.loss")
    return path


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("line", [True, False])
@pytest.mark.parametrize("loss", [None, COUNTED])
def test_datatrove(tmp_path: Path, dtype: str, line: bool, loss: Any) -> None:
    named = f"org/tokenizer|{dtype[-1]}" if line else None
    check(write_ds(tmp_path / "a.ds", dtype, named, loss), loss)
    check(tmp_path, loss)  # the files beside it are no shards
    (tmp_path / "a.ds.metadata").write_text("gpt2\n9\n9 T")  # older ones have no size
    check(tmp_path, loss)


def test_faults_of_datatrove(tmp_path: Path) -> None:
    path = write_ds(tmp_path / "a.ds", "<u4", "gpt2|2")
    with pytest.raises(
        ConfigError, match=r"a\.ds has 36 bytes for the 9 tokens .* the 2 bytes per"
    ):
        open_documents(str(path), 10)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"a\.ds has 35 bytes for the 9 tokens"):
        open_documents(str(path), 10)
    write_ds(path, loss=COUNTED[:-1])
    with pytest.raises(ConfigError, match=r"a\.ds\.loss has 8 bytes, not one for each of the 9"):
        open_documents(str(path), 10)
    (tmp_path / "a.ds.index").unlink()
    with pytest.raises(ConfigError, match=r"a\.ds is a shard of datatrove without a\.ds\.index"):
        open_documents(str(path), 10)


def write_idx(path: Path, version: int, spans: Any, pairs: bool = False) -> Path:
    """Write a shard of Fast-LLM, as `GPTMemmapDataset.write_dataset` did."""
    IDS.astype("<u2").tofile(path)
    flags = bytes([bool(spans), pairs][: version - 1])
    begins = 2 * (np.cumsum(LENGTHS) - LENGTHS)
    content = b"MMIDIDX\0\0" + struct.pack("<Q", version) + flags + struct.pack("<BQQ", 8, 4, 5)
    content += LENGTHS.astype("<i4").tobytes() + begins.astype("<i8").tobytes()
    if spans:
        content += np.array([len(one) for one in spans], "<i4").tobytes()
        ends = [(begin, end - 1) for one in spans for begin, end in one]
        content += np.array(ends, "<i4").tobytes()
    if pairs:
        content += np.zeros(16, "<i4").tobytes()
    content += np.arange(5, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("spans", [None, SPANS])
def test_older_shards_of_fast_llm(tmp_path: Path, version: int, spans: Any) -> None:
    check(write_idx(tmp_path / "a.bin", version, spans), spans and COUNTED)
    check(tmp_path, spans and COUNTED)
    check(tmp_path / "a", spans and COUNTED)


def test_faults_of_older_shards_of_fast_llm(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "a.bin", 3, None, pairs=True)
    with pytest.raises(ConfigError, match=r"a\.idx, version 3 by Fast-LLM, has preference spans"):
        open_documents(str(path), 10)
    content = write_idx(path, 3, SPANS).with_suffix(".idx").read_bytes()
    for size in (17, 20, 40, 90):
        path.with_suffix(".idx").write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"a\.idx, by Fast-LLM, is truncated"):
            open_documents(str(path), 10)
    path.with_suffix(".idx").write_bytes(content + bytes(4))
    with pytest.raises(ConfigError, match=r"a\.idx, by Fast-LLM, does not fit a\.bin"):
        open_documents(str(path), 10)
    write_idx(path, 2, [[], [(0, 3)], [], []])
    with pytest.raises(ConfigError, match="has loss masking spans beyond its documents"):
        open_documents(str(path), 10)
    write_idx(path, 4, None)
    with pytest.raises(
        ConfigError, match="no index of version 1 in Megatron's format, nor of 2 or"
    ):
        open_documents(str(path), 10)


def write_fast_llm(path: Path, dtype: str, spans: Any, **more: Any) -> Path:
    """Write one file, as Fast-LLM's `MemmapDataset.write_dataset` does."""
    content = bytearray(b"fast_llm_prepared_dataset" + bytes(8) + b"lm begin")

    def part(name: str, data: bytes, **known: Any) -> dict[str, Any]:
        begin = len(content)
        content.extend(f"{name} begin".encode() + data + f"{name} end".encode())
        return {"type": name, "begin": begin, "end": len(content), "num_documents": 4} | known

    ends = np.append(0, np.cumsum(LENGTHS)).astype("<i8")
    data = IDS.astype(dtype).tobytes() + ends.tobytes()
    tokens = part("token", data, num_tokens=9, data_type=np.dtype(dtype).name)
    described = {"type": "language_model", "tokens": tokens, "loss_masking_spans": {"type": "none"}}
    if spans:
        counts = np.append(0, np.cumsum([len(one) for one in spans])).astype("<i4")
        ranges = np.array([span for one in spans for span in one], "<i4")
        described["loss_masking_spans"] = part(
            "range", ranges.tobytes() + counts.tobytes(), num_ranges=len(ranges)
        )
    content.extend(b"lm end")
    described |= {"begin": 33, "end": len(content), "chosen_spans": {}} | more
    text = json.dumps(described).encode()
    content[25:33] = len(content).to_bytes(8, "big")
    path.write_bytes(content + len(text).to_bytes(4, "big") + text)
    return path


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
@pytest.mark.parametrize("spans", [None, SPANS])
def test_newer_shards_of_fast_llm(tmp_path: Path, dtype: str, spans: Any) -> None:
    check(write_fast_llm(tmp_path / "shard_0_0.fast_llm_dataset", dtype, spans), spans and COUNTED)
    (tmp_path / "fast_llm_config.yaml").write_text("type: memmap")
    check(tmp_path, spans and COUNTED)


@pytest.mark.parametrize("name", ["rejected_spans", "image_patches", "advantages", "of_tomorrow"])
def test_other_parts_of_fast_llm_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_fast_llm(tmp_path / "a.fast_llm_dataset", "<u2", None, **{name: {"type": "x"}})
    with pytest.raises(
        ConfigError, match=rf"a\.fast_llm_dataset, by Fast-LLM, has {name}, which is"
    ):
        open_documents(str(path), 10)


def test_faults_of_newer_shards_of_fast_llm(tmp_path: Path) -> None:
    path = write_fast_llm(tmp_path / "a.fast_llm_dataset", "<u2", SPANS)
    content = path.read_bytes()
    for damaged in (
        content[:-9],
        content[:50],
        b"x" + content,
        content.replace(b"n end", b"n and"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"is no shard of Fast-LLM, or is damaged \("):
            open_documents(str(path), 10)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_of_olmo_have_no_header(tmp_path: Path, dtype: str) -> None:
    """OLMo's `.npy` are bare integers of numpy's memmap; their type is in its configuration."""
    path = tmp_path / "part-0-00000.npy"
    ids = np.arange(70_000 if dtype == "uint32" else 300)
    ids.astype(dtype).tofile(path)
    with pytest.raises(
        ConfigError, match=r"no header of \.npy, as the token files of OLMo: .*json"
    ):
        open_documents(str(path), 70_000)
    path.with_suffix(".json").write_text(json.dumps({"dtype": dtype}))
    np.testing.assert_array_equal(open_documents(str(path), 70_000).stream(0, len(ids)), ids)


@pytest.mark.parametrize("largest", [300, 150_000])
def test_wider_ids_are_not_read_as_uint16(tmp_path: Path, largest: int) -> None:
    path, ids = tmp_path / "a.bin", np.linspace(0, largest, 99).astype("<u4")
    ids.tofile(path)
    with pytest.raises(
        ConfigError, match=r"a\.bin is read as uint16, but every second one is 0 to"
    ):
        open_documents(str(path), largest + 1)
    (tmp_path / "a.json").write_text('{"dtype": "uint32"}')
    np.testing.assert_array_equal(open_documents(str(path), largest + 1).stream(0, 99), ids)
    (tmp_path / "a.json").write_text('{"dtype": "uint16"}')
    assert len(open_documents(str(path), 65_536)) == 198
