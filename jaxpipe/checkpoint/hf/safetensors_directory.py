"""Reading and writing of a Hugging Face safetensors directory: one file, or shards and an index.

Memory holds one tensor at a time: each tensor is read from a file that is opened for it alone, and
written directly to its shard.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpipe.checkpoint.hf import block_fp8, mxfp4
from jaxpipe.config import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_INTEGERS: dict[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
_NAMES = {dtype: name for name, dtype in (DTYPES | _INTEGERS).items()}
_QUANTISED = "U8"  # of blocks and scales in MXFP4
# float64 and scaled 8-bit floats are read as float32, the dtype of a run's parameters.
_FLOATS = DTYPES | dict.fromkeys(("F64", block_fp8.KIND), DTYPES["F32"])
# Insertions of torch.compile and FSDP into the names of wrapped modules, and prefixes that peft,
# DistributedDataParallel and multimodal models put before all names of a text model.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PREFIXES = ("base_model.model.", "module.", "language_model.")
ADAPTER_SETTINGS = "adapter_config.json"  # of PEFT
_OTHERS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")  # suffixes of weights in other forms
_ADAPTERS = (".lora_A.", ".lora_B.", ".base_layer.", ".modules_to_save.")

Shape = tuple[int, ...]


class TensorFiles:
    """The tensors of a safetensors directory by name, without wrapper names of torch modules.

    Matrices in MXFP4 are there as if they were stored in bfloat16.

    Args:
      directory: holds model.safetensors, or shards and their index.
      without: suffixes of names to ignore.

    Raises:
      ConfigError: shards or tensors of the index are missing, files are damaged, 8-bit floats have
        no scales (`block_fp8`), or tensors belong to an adapter that is not merged.
    """

    def __init__(self, directory: Path, without: tuple[str, ...] = ()):
        self.directory = directory
        self._stored: dict[str, tuple[Path, str]] = {}  # file, and name in the file
        self._kinds: dict[str, tuple[Shape, np.dtype | None]] = {}  # None: cannot be read
        self._scaled: set[str] = set()  # tensors of 8-bit floats
        for path in self._files():
            with _open_file(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if _remove_wrappers(name).endswith(without):
                        continue
                    self._add_tensor(path, name, file.get_slice(name))
        self._take_scales()
        self._merge_quantised()
        wanted = [name for name in self._index if not _remove_wrappers(name).endswith(without)]
        if lost := [name for name in wanted if _remove_wrappers(name) not in self._stored]:
            raise ConfigError(
                f"{directory / INDEX} lists {lost[0]} in {self._index[lost[0]]}, which does not "
                f"hold it: take the index and the shards of the same checkpoint."
            )

    def _add_tensor(self, path: Path, stored: str, part: Any) -> None:
        name, kind = _remove_wrappers(stored), part.get_dtype()
        if any(adapter in stored for adapter in _ADAPTERS):
            raise ConfigError(
                f"{path} holds {stored}, of an adapter that is not merged into the weights: merge "
                f"it (peft's merge_and_unload) and save the model again."
            )
        if kind == _QUANTISED and name.endswith((mxfp4.BLOCKS, mxfp4.SCALES)):
            self._stored[name] = path, stored
            self._kinds[name] = tuple(part.get_shape()), np.dtype(np.uint8)
            return
        if name in self._stored:
            raise ConfigError(
                f"{path} holds {stored}, but {self._stored[name][1]} names the same tensor {name}: "
                f"remove one of them."
            )
        self._stored[name] = path, stored
        self._kinds[name] = tuple(part.get_shape()), (_FLOATS | _INTEGERS).get(kind)
        if kind == block_fp8.KIND:
            self._scaled.add(name)

    def _take_scales(self) -> None:
        """Check the scales of all 8-bit tensors, which are no tensors of their own."""
        for name in self._scaled:
            if (key := name + block_fp8.SCALE) in self._kinds:
                self.dtype(key)
            scales, _ = self._kinds.pop(key, (None, None))
            block_fp8.check_scales(name, self.shape(name), scales, self.directory)

    def _merge_quantised(self) -> None:
        """Replace blocks and scales in MXFP4 by the matrices that they hold."""
        for name in mxfp4.names_of(self._kinds):
            shape, _ = self._kinds.pop(name + mxfp4.BLOCKS)
            scales, _ = self._kinds.pop(name + mxfp4.SCALES)
            if len(shape) < 3 or shape != (*scales, 16):
                raise ConfigError(
                    f"{self.directory} has {name} in MXFP4 with blocks {shape} and scales "
                    f"{scales}, but a scale is of 16 bytes: download both again."
                )
            self._kinds[name] = mxfp4.shape_of(shape), mxfp4.DTYPE

    @property
    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._kinds)

    def shape(self, name: str) -> Shape:
        """Shape of the tensor of that name."""
        return self._kinds[name][0]

    def dtype(self, name: str, *, integer: bool = False) -> np.dtype:
        """Dtype as which a tensor is read; `ConfigError` if it is not of floats, or of integers."""
        dtype = self._kinds[name][1]
        if dtype is None or (dtype.kind == "i") != integer:
            path, stored = self._stored[name]
            with _open_file(path) as file:
                kind = file.get_slice(stored).get_dtype()
            raise ConfigError(
                f"{path} holds {stored} as {kind} but only "
                f"{', '.join(_INTEGERS if integer else _FLOATS)} can be read: take a checkpoint in "
                f"which it is of one of these dtypes."
            )
        return dtype

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Read one tensor, or entry `index` of its first dim, into new memory.

        Its file is unmapped afterwards.
        """
        if name not in self._stored:  # in MXFP4
            suffixes = mxfp4.BLOCKS, mxfp4.SCALES
            return mxfp4.dequantise(*(self._read_stored(name + end, index) for end in suffixes))
        if name in self._scaled:
            path, stored = self._stored[name]
            scales = self._read_stored(name + block_fp8.SCALE)
            tensor = block_fp8.scaled(block_fp8.read_e4m3(path, stored), scales)
            return tensor if index is None else tensor[index]
        tensor = self._read_stored(name, index)
        return tensor.astype(self.dtype(name, integer=tensor.dtype.kind == "i"), copy=False)

    def _read_stored(self, name: str, index: int | None = None) -> np.ndarray:
        path, stored = self._stored[name]
        with _open_file(path) as file:
            if index is None:
                return file.get_tensor(stored)
            return file.get_slice(stored)[index]

    @cached_property
    def _index(self) -> dict[str, str]:
        """File name by tensor name; empty without an index."""
        path = self.directory / INDEX
        if (self.directory / ONE_FILE).exists() or not path.exists():
            return {}
        try:
            index = dict(json.loads(path.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not an index of safetensors, JSON with a weight_map: correct it."
            ) from error
        for name, file in index.items():
            if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
                raise ConfigError(
                    f"{path} says that {name} is in {file!r}, which is no file of its directory: "
                    f"take the checkpoint from where you trust it."
                )
        return index

    def _files(self) -> list[Path]:
        if (self.directory / ADAPTER_SETTINGS).exists():
            raise ConfigError(
                f"{self.directory} has {ADAPTER_SETTINGS}, by which transformers adds an adapter "
                f"to the model: give an adapter as lora.adapter, and move that file elsewhere to "
                f"take the model without it."
            )
        if (self.directory / ONE_FILE).exists():
            return [self.directory / ONE_FILE]
        if not self._index:
            others = [path.name for path in self.directory.glob("*") if path.suffix in _OTHERS]
            raise ConfigError(
                f"{self.directory} has neither {ONE_FILE} nor {INDEX}"
                f"{f', but {min(others)}' if others else ''}: give the directory of a Hugging Face "
                f"checkpoint in safetensors, as `save_pretrained` of transformers writes it."
            )
        files = [self.directory / name for name in dict.fromkeys(self._index.values())]
        if missing := [path.name for path in files if not path.exists()]:
            raise ConfigError(
                f"{self.directory} lacks {len(missing)} of the {len(files)} shards that its index "
                f"lists ({missing[0]} first): download them."
            )
        return files


def _remove_wrappers(name: str) -> str:
    """A tensor's name without the insertions and prefixes of wrappers.

    >>> _remove_wrappers("base_model.model.model.layers.0._orig_mod.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}): copy or download it again.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): make it readable.") from error


@contextlib.contextmanager
def complete_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory, which gets the name `target` when the body has written it.

    Raises `ConfigError` where `target` exists and is not an empty directory, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} exists and is not an empty directory: choose another one to export to."
        )
    target = target.absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}): choose a directory that is writable "
            f"and has room."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tensors(
    directory: Path,
    shapes: dict[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: np.dtype,
    max_shard_bytes: int,
    others: Mapping[str, np.dtype] = MappingProxyType({}),
) -> None:
    """Write tensors, cast to `dtype`, as one file or as shards and an index.

    Args:
      directory: existing directory to write to.
      shapes: shape by name; the shards are planned from it before a tensor is read.
      tensors: (name, tensor) in the order of `shapes`.
      dtype: a dtype of `DTYPES`.
      max_shard_bytes: limit on the tensors of a shard [bytes]; a larger tensor has its own shard.
      others: dtypes of tensors that are not written in `dtype`.
    """
    kinds = {name: others.get(name, dtype) for name in shapes}
    size_of = {name: int(np.prod(shape)) * kinds[name].itemsize for name, shape in shapes.items()}
    shards = list(_split_into_shards(size_of, max_shard_bytes))
    names = (
        [ONE_FILE]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    tensors = iter(tensors)
    for file_name, shard in zip(names, shards):
        with (directory / file_name).open("wb") as file:
            file.write(_build_header({name: (shapes[name], kinds[name]) for name in shard}))
            for name, (tensor_name, tensor) in zip(shard, tensors):
                assert (tensor_name, tensor.shape) == (name, shapes[name])
                array = np.ascontiguousarray(tensor, kinds[name])
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(size_of.values())},
            "weight_map": {name: file for file, shard in zip(names, shards) for name in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split_into_shards(size_of: dict[str, int], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    shard_size = 0
    for name, size in size_of.items():
        if shard and shard_size + size > most:
            yield shard
            shard, shard_size = [], 0
        shard.append(name)
        shard_size += size
    yield shard


def _build_header(kinds: dict[str, tuple[Shape, np.dtype]]) -> bytes:
    """Length and JSON of a file's header. Source: https://huggingface.co/docs/safetensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, (shape, dtype) in kinds.items():
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
