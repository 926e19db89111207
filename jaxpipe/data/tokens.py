"""Files of token ids, memory-mapped, and checked as a whole before the first step."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxpipe.config import ConfigError

_CHUNK = 1 << 20  # tokens checked at a time


@dataclass(frozen=True)
class Tokens:
    """Token ids in text order, all of them in the vocabulary."""

    ids: np.ndarray  # integers [tokens], a memory map
    digest: str  # of the whole file
    place: str  # where they are, for messages

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, fraction: float) -> tuple["Tokens", "Tokens"]:
        """All but the last `fraction` of the tokens, and these."""
        cut = len(self) - round(fraction * len(self))
        return (
            replace(self, ids=self.ids[:cut], place=f"{self.place}[:{cut}]"),
            replace(self, ids=self.ids[cut:], place=f"{self.place}[{cut}:]"),
        )


class Sidecar(msgspec.Struct, frozen=True):
    """What `tokens.json` says of the `tokens.bin` beside it; other fields are ignored."""

    dtype: Literal["uint8", "uint16", "uint32"]


def open_tokens(path: Path, vocab_size: int) -> Tokens:
    """Map a file of token ids and read it once to check it, at about 1 GB/s.

    A `.npy` file names its integer type itself. A `.bin` file is bare little-endian integers of the
    type in its sidecar, `{"dtype": "uint8" | "uint16" | "uint32"}` in the `.json` file of the same
    name, or uint16 where there is none.

    Raises `ConfigError` where the file is missing, empty, truncated or not 1-D integers, or where
    an id is not in 0..vocab_size-1.
    """
    if path.suffix not in (".bin", ".npy"):
        raise ConfigError(
            f"a token file ends in .bin or .npy, unlike {path}: convert it, or rename it."
        )
    if not path.is_file():
        raise ConfigError(f"the token file {path} does not exist: correct its path in [data].")
    if path.stat().st_size == 0:
        raise ConfigError(f"the token file {path} is empty: write it again, or name another.")
    ids = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    return Tokens(ids, _check(ids, path, vocab_size), str(path))


def _map_npy(path: Path) -> np.ndarray:
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ConfigError(
            f"the token file {path} is truncated, or not a .npy array of integers ({error}): write "
            f"it again with numpy.save."
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"a token file is a 1-D array of integers, but {path} has shape {ids.shape} and dtype "
            f"{ids.dtype}: flatten it, or convert it."
        )
    return ids


def _map_bin(path: Path) -> np.ndarray:
    sidecar, size = path.with_suffix(".json"), path.stat().st_size
    try:
        name = "uint16"
        if sidecar.exists():
            name = msgspec.json.decode(sidecar.read_bytes(), type=Sidecar).dtype
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{sidecar} gives the type of the tokens in {path} and must be like {{"dtype": '
            f'"uint16"}}, with uint8, uint16 or uint32 ({error}): correct it.'
        ) from error
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        raise ConfigError(
            f"the token file {path} has {size} bytes, not a multiple of the {dtype.itemsize} bytes "
            f"of a {name}: it is truncated, or {sidecar.name} must name another dtype."
        )
    return np.memmap(path, dtype, mode="r")


def _check(ids: np.ndarray, path: Path, vocab_size: int) -> str:
    """Digest of `[tokens]`: 16 hex digits."""
    digest = hashlib.blake2b(ids.dtype.str.encode(), digest_size=8)
    outside: list[int] = []  # positions of the smallest and largest id of a chunk, where too far
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        extremes = (start + int(chunk.argmin()), start + int(chunk.argmax()))
        outside += (place for place in extremes if not 0 <= ids[place] < vocab_size)
        digest.update(chunk.data)
    if outside:
        place = max(outside, key=lambda place: abs(int(ids[place])))
        raise ConfigError(
            f"token ids lie in 0..model.vocab_size-1, but {path} has {ids[place]} at position "
            f"{place} and model.vocab_size is {vocab_size}: raise it, or use data of this "
            f"vocabulary."
        )
    return digest.hexdigest()
