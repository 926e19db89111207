"""A directory of safetensors as Hugging Face lays it out: one file, or shards and their index.

Tensors are read one by one, each from a file opened for it alone, so that no more than one is in
memory; they are written likewise, straight into the shard that they belong to.
"""

import json
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpipe.config import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Shape = tuple[int, ...]


class TensorFiles:
    """The tensors of such a directory, by name, but those that end with one of `without`.

    Raises `ConfigError` where shards or tensors of the index are missing, files are damaged, or a
    tensor is of a dtype other than float32, float16 and bfloat16.
    """

    def __init__(self, directory: Path, without: tuple[str, ...] = ()):
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._kinds: dict[str, tuple[Shape, np.dtype]] = {}
        for path in self._files():
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if name.endswith(without):
                        continue
                    part = file.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        raise ConfigError(
                            f"{path} holds {name} as {part.get_dtype()} but only "
                            f"{', '.join(DTYPES)} can be read: take a checkpoint that is not "
                            f"quantised."
                        )
                    self._file_of[name] = path
                    self._kinds[name] = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        wanted = [name for name in self._index if not name.endswith(without)]
        if lost := [name for name in wanted if name not in self._kinds]:
            raise ConfigError(
                f"{directory / INDEX} lists {lost[0]} in {self._index[lost[0]]}, which does not "
                f"hold it: download that file again."
            )

    @property
    def names(self) -> list[str]:
        """All tensors, file by file."""
        return list(self._kinds)

    def shape(self, name: str) -> Shape:
        """Shape of the tensor of that name."""
        return self._kinds[name][0]

    def dtype(self, name: str) -> np.dtype:
        """Dtype of the tensor of that name."""
        return self._kinds[name][1]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in memory of its own; its file's pages are let go."""
        with _opened(self._file_of[name]) as file:
            return file.get_tensor(name)

    @cached_property
    def _index(self) -> dict[str, str]:
        """File names by tensor; empty without an index."""
        path = self.directory / INDEX
        if (self.directory / ONE_FILE).exists() or not path.exists():
            return {}
        try:
            index = dict(json.loads(path.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not an index of safetensors: download it again."
            ) from error
        for name, file in index.items():
            if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
                raise ConfigError(
                    f"{path} says that {name} is in {file!r}, which is no file of its directory: "
                    f"take the checkpoint from where you trust it."
                )
        return index

    def _files(self) -> list[Path]:
        if (self.directory / ONE_FILE).exists():
            return [self.directory / ONE_FILE]
        if not self._index:
            raise ConfigError(
                f"{self.directory} has neither {ONE_FILE} nor {INDEX}: give the directory of a "
                f"Hugging Face checkpoint in safetensors."
            )
        files = [self.directory / name for name in dict.fromkeys(self._index.values())]
        if missing := [path.name for path in files if not path.exists()]:
            raise ConfigError(
                f"{self.directory} lacks {len(missing)} of the {len(files)} shards that its index "
                f"lists ({missing[0]} first): download them."
            )
        return files


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}): download it again.") from error


def write_tensors(
    directory: Path,
    shapes: dict[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> None:
    """Write `tensors`, which come in the order of `shapes`, cast to `dtype`.

    A shard has at most `max_shard_bytes` of tensors, or one tensor; one shard alone needs no index.
    """
    size_of = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
    shards = list(_shards(size_of, max_shard_bytes))
    names = (
        [ONE_FILE]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    tensors = iter(tensors)
    for file_name, shard in zip(names, shards):
        with (directory / file_name).open("wb") as file:
            file.write(_header({name: shapes[name] for name in shard}, dtype))
            for name, (given, tensor) in zip(shard, tensors):
                assert (given, tensor.shape) == (name, shapes[name])
                file.write(np.ascontiguousarray(tensor, dtype).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(size_of.values())},
            "weight_map": {name: file for file, shard in zip(names, shards) for name in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(size_of: dict[str, int], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    held = 0
    for name, size in size_of.items():
        if shard and held + size > most:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    yield shard


def _header(shapes: dict[str, Shape], dtype: np.dtype) -> bytes:
    """Length and JSON as the format wants them: https://huggingface.co/docs/safetensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
