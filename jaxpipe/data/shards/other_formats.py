"""Shards of datatrove and nanotron (`.ds`) and of Fast-LLM, all little-endian.

datatrove writes `NAME.ds` with ids, `NAME.ds.index` with uint64 tokens at the end of each document,
perhaps `NAME.ds.loss` with a byte per token, 1 if it counts, and `NAME.ds.metadata`, whose first
line is TOKENIZER|BYTES OF AN ID (datatrove, pipeline/tokens/tokenizer.py).

Fast-LLM's older shards are Megatron's `.bin` with an `.idx` of version 2 or 3, which has flags
before the type of the ids, and the spans of tokens that do not count (first and last, in their
document) before the documents. Its newer `.fast_llm_dataset` is one file: a name, the place of a
JSON description (8 bytes, big-endian), arrays between marks, and the description (fast_llm,
data/dataset/gpt/legacy_memmap.py and data/dataset/memmap).
"""

import json
import struct
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.shards.indexed import MAGIC, TYPES
from jaxpipe.data.shards.tokens import BareShard, IdFile

FAST_LLM = ".fast_llm_dataset"
_NAME = b"fast_llm_prepared_dataset"
_NO_PAIRS = "which is not read: write it without, or prepare pairs with `python -m jaxpipe.data`"


def open_datatrove(path: Path) -> BareShard:
    """Open a `.ds` file. Raises `ConfigError` where files beside it are missing or do not fit."""
    index, metadata, loss = (Path(f"{path}.{name}") for name in ("index", "metadata", "loss"))
    if not index.exists():
        raise ConfigError(
            f"{path} is a shard of datatrove without {index.name}, which says where its documents "
            f"end: copy it there."
        )
    size, ends = path.stat().st_size, np.fromfile(index, "<u8").astype(np.int64)
    tokens = int(ends[-1]) if len(ends) else 0
    width = size // tokens if tokens else 2
    line = metadata.read_text("utf-8").partition("\n")[0] if metadata.exists() else ""
    named = line.rpartition("|")[2].strip()
    fits = size == tokens * width and width in (2, 4, 8) and (np.diff(ends, prepend=0) >= 0).all()
    if not fits or ("|" in line and named != str(width)):
        raise ConfigError(
            f"{path} has {size} bytes for the {tokens} tokens of {index.name}"
            f"{f' and the {named} bytes per token of {metadata.name}' if named else ''}, or these "
            f"documents do not follow each other: it is truncated, or must be written again."
        )
    mask = None
    if loss.exists():
        if loss.stat().st_size != tokens:
            raise ConfigError(
                f"{loss} has {loss.stat().st_size} bytes, not one for each of the {tokens} tokens "
                f"of {path.name}: write both again."
            )
        mask = partial(_read_flags, IdFile(loss, np.dtype("u1"), 0, tokens))
    ids = IdFile(path, np.dtype(f"<u{width}"), 0, tokens)
    return _shard(ids, ends, mask, b"" if mask is None else loss.read_bytes())


def _read_flags(file: IdFile, begin: int, end: int) -> np.ndarray:
    return file.read(begin, end) != 0


def index_version(path: Path) -> int:
    """Return the version of an `.idx` that begins as Megatron's, else 0."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC) + 8)
    known = len(head) == len(MAGIC) + 8 and head.startswith(MAGIC)
    return int.from_bytes(head[len(MAGIC) :], "little") if known else 0


def open_fast_llm_index(path: Path, version: int) -> BareShard:
    """Open a `.bin` whose `.idx` has version 2 or 3, by Fast-LLM.

    Raises `ConfigError` where it has preference spans, or the two do not fit.
    """
    index = path.with_suffix(".idx")
    content, at = index.read_bytes(), len(MAGIC) + 8
    try:
        flags = content[at : at + version - 1]
        code, documents, _ = struct.unpack_from("<BQQ", content, at + version - 1)
        at += version - 1 + struct.calcsize("<BQQ")
        if version == 3 and flags[1]:
            raise ConfigError(f"{index}, version 3 by Fast-LLM, has preference spans, {_NO_PAIRS}.")
        if code not in TYPES:
            raise ConfigError(f"{index} has ids of type {code}, no integer: write it again.")
        dtype = np.dtype(TYPES[code])
        lengths, at = _take(content, at, "<i4", documents)
        begins, at = _take(content, at, "<i8", documents)
        counts, at = _take(content, at, "<i4", documents * bool(flags[0]))
        spans, at = _take(content, at, "<i4", 2 * int(counts.sum()))
        firsts, at = _take(content, at, "<i8", documents + 1)
    except (struct.error, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{index}, by Fast-LLM, is truncated: write it again.") from error
    ends = np.cumsum(lengths, dtype=np.int64)
    fits = path.stat().st_size == int(lengths.sum()) * dtype.itemsize and at == len(content)
    fits = fits and (firsts == np.arange(documents + 1)).all()
    if not fits or (begins != (ends - lengths) * dtype.itemsize).any():
        raise ConfigError(f"{index}, by Fast-LLM, does not fit {path.name}: write both again.")
    ranges = spans.reshape(-1, 2) + np.array([0, 1])  # a span names its last token
    return _masked_shard(IdFile(path, dtype, 0, int(lengths.sum())), ends, counts, ranges)


def _take(content: bytes, at: int, dtype: str, count: int) -> tuple[np.ndarray, int]:
    values = np.frombuffer(content, dtype, count, at) if count else np.zeros(0, dtype)
    return values.astype(np.int64), at + values.nbytes


def open_fast_llm(path: Path) -> BareShard:
    """Open a `.fast_llm_dataset` file.

    Raises `ConfigError` where it is damaged, or has something besides tokens and loss masks.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_NAME)) != _NAME:
                raise ValueError("its beginning is another")
            file.seek(int.from_bytes(file.read(8), "big"))
            described = json.loads(file.read(int.from_bytes(file.read(4), "big")))
        more = {name: _type_of(value) for name, value in described.items()}
        for name in ("begin", "end", "type", "tokens", "loss_masking_spans"):
            more.pop(name, None)
        kind = described.get("type"), _type_of(described["tokens"]) or "token"
        spans = described.get("loss_masking_spans")
        masked = _type_of(spans)
        unknown = [name for name, value in more.items() if value]
        if unknown or kind != ("language_model", "token") or masked not in ("", "range"):
            raise ConfigError(
                f"{path}, by Fast-LLM, has {', '.join(unknown) or f'{kind} masked by {masked!r}'}, "
                f"{_NO_PAIRS}."
            )
        tokens = described["tokens"]
        dtype, documents = np.dtype(tokens["data_type"]).newbyteorder("<"), tokens["num_documents"]
        if dtype.kind not in "iu":
            raise ConfigError(f"{path} has ids of type {dtype}, no integer: write it again.")
        at = _check_marks(path, tokens, b"token")
        ids = IdFile(path, dtype, at, tokens["num_tokens"])
        at += ids.size * dtype.itemsize
        ends = np.fromfile(path, "<i8", documents + 1, offset=at)
        if len(ends) <= documents or ends[0] or ends[-1] != ids.size or (np.diff(ends) < 0).any():
            raise ValueError("its documents do not fit its tokens")
        counts: np.ndarray = np.zeros(0, np.int64)
        ranges: np.ndarray = np.zeros((0, 2), np.int64)
        if masked:
            at = _check_marks(path, spans, b"range")
            ranges = np.fromfile(path, "<i4", 2 * spans["num_ranges"], offset=at).reshape(-1, 2)
            totals = np.fromfile(path, "<i4", documents + 1, offset=at + ranges.nbytes)
            counts = np.diff(totals.astype(np.int64))
            if len(counts) != documents or counts.sum() != len(ranges):
                raise ValueError("its loss masking spans do not fit its documents")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no shard of Fast-LLM, or is damaged ({first_line(error)}): write it again."
        ) from error
    return _masked_shard(ids, ends[1:], counts, ranges.astype(np.int64))


def _type_of(value: Any) -> str:
    """Return the type that Fast-LLM gives to a part of a shard; empty: it has none."""
    kind = value.get("type") if isinstance(value, dict) else value
    return "" if kind in (None, "none") else str(kind)


def _check_marks(path: Path, part: dict[str, Any], name: bytes) -> int:
    """Return where the content of a part begins; raises `ValueError` where its marks are absent."""
    marks = name + b" begin", name + b" end"
    with path.open("rb") as file:
        for mark, at in zip(marks, (part["begin"], part["end"] - len(marks[1]))):
            file.seek(at)
            if file.read(len(mark)) != mark:
                raise ValueError(f"it has no mark {mark.decode()!r} at byte {at}")
    return part["begin"] + len(marks[0])


def _masked_shard(
    ids: IdFile, ends: np.ndarray, counts: np.ndarray, ranges: np.ndarray
) -> BareShard:
    """Return a shard in which some tokens do not count.

    Args:
      ids: the tokens.
      ends: cumulative tokens at the end of each document.
      counts: the number of ranges of each document; empty: all tokens count.
      ranges: begin and end within their document of tokens that do not count, `[ranges, 2]`.
    """
    if not len(ranges):
        return _shard(ids, ends, None, b"")
    lengths = np.diff(ends, prepend=0)
    widths, starts = (np.repeat(values, counts) for values in (lengths, ends - lengths))
    if (ranges[:, 0] < 0).any() or (ranges[:, 1] > widths).any():
        raise ConfigError(
            f"{ids.path} has loss masking spans beyond its documents: write it again."
        )
    ranges = ranges + starts[:, None]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    return _shard(ids, ends, partial(_outside, ranges), ranges.tobytes())


def _outside(ranges: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return which tokens from `begin` to `end` are in none of the ranges, which are sorted."""
    first = int(np.searchsorted(np.maximum.accumulate(ranges[:, 1]), begin, side="right"))
    last = int(np.searchsorted(ranges[:, 0], end))
    change = np.zeros(end - begin + 1, np.int64)
    edges = np.clip(ranges[first:last] - begin, 0, end - begin)
    np.add.at(change, edges[:, 0], 1)
    np.subtract.at(change, edges[:, 1], 1)
    return np.cumsum(change)[:-1] == 0


def _shard(
    ids: IdFile, ends: np.ndarray, mask: Callable[[int, int], np.ndarray] | None, masked: bytes
) -> BareShard:
    digest = blake2b(ids.sampled_digest().encode() + ends.tobytes() + masked, digest_size=8)
    return BareShard(ids, f"~{digest.hexdigest()}", vouched=False, ends=ends, mask=mask)
