"""Parameters of Llama 3 and Qwen3 as Hugging Face names and lays them out, in and out.

Ours multiply from the right, `x @ w` with w `[in, out]`; torch's `Linear` holds `[out, in]`. Heads
and their rotary halves have the same order in both. A tied head is the embedding in both, but some
checkpoints hold it twice.

Tensors are read, converted and written one by one, whichever way: of a model, memory has one tensor
on the way in and one layer on the way out.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.checkpoint.huggingface_config import check_same_model, config_of, read_config
from jaxpipe.checkpoint.safetensors_directory import Shape, TensorFiles, write_tensors
from jaxpipe.checkpoint.streaming import LazyArray, StoredCheckpoint, nested, save_parameters
from jaxpipe.config import ConfigError, ModelConfig
from jaxpipe.model import Decoder

Tree = Any

# Ours, theirs, and whether one is the other transposed.
_LAYER = {
    "attn_norm/scale": ("input_layernorm", False),
    "attn/wq": ("self_attn.q_proj", True),
    "attn/wk": ("self_attn.k_proj", True),
    "attn/wv": ("self_attn.v_proj", True),
    "attn/q_norm/scale": ("self_attn.q_norm", False),
    "attn/k_norm/scale": ("self_attn.k_norm", False),
    "attn/wo": ("self_attn.o_proj", True),
    "mlp_norm/scale": ("post_attention_layernorm", False),
    "mlp/w_gate": ("mlp.gate_proj", True),
    "mlp/w_up": ("mlp.up_proj", True),
    "mlp/w_down": ("mlp.down_proj", True),
}
_ENDS = {
    "embed": ("model.embed_tokens", False),
    "final_norm/scale": ("model.norm", False),
    "head": ("lm_head", True),
}
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Parameter:
    """One parameter under both names: `("layers", "3", "attn", "wq")` and theirs."""

    path: tuple[str, ...]
    shape: Shape  # ours
    name: str
    transposed: bool

    @property
    def their_shape(self) -> Shape:
        """The shape of the tensor that goes by `name`."""
        return self.shape[::-1] if self.transposed else self.shape

    def converted(self, array: np.ndarray) -> np.ndarray:
        """Theirs from ours, or ours from theirs: a view."""
        return array.T if self.transposed else array


def parameters(model: ModelConfig) -> list[Parameter]:
    """All parameters of a model: the ends, then layer by layer."""
    decoder, key = Decoder(model), jax.random.key(0)
    ends = _paths(jax.eval_shape(decoder.init_ends, key))
    layer = _paths(jax.eval_shape(lambda key: decoder.init_layer(key, 0), key))
    found = [_parameter(("ends",), path, shape, "", _ENDS) for path, shape in ends.items()]
    for i in range(model.n_layers):
        start = ("layers", str(i))
        found += [
            _parameter(start, path, shape, f"model.layers.{i}.", _LAYER)
            for path, shape in layer.items()
        ]
    return found


def import_huggingface(
    source: Path, model: ModelConfig, checkpoints: Path, meta: dict[str, Any]
) -> Path:
    """Write the parameters in `source` as step 0 in `checkpoints`; return the step's directory.

    They keep the dtypes that they have; a restore casts them to those of the run. Raises
    `ConfigError`, with nothing written, where config.json does not describe `model`, or tensors
    are missing, unknown or of another shape, or `checkpoints` holds some already.
    """
    check_same_model(read_config(source), model, source)
    files = TensorFiles(source)
    wanted = parameters(model)
    _check_tensors(files, wanted, tied=model.tie_embeddings)

    def lazy(own: Parameter) -> LazyArray:
        return LazyArray(
            own.shape, files.dtype(own.name), lambda: own.converted(files.read(own.name))
        )

    tree = nested({own.path: lazy(own) for own in wanted})
    return save_parameters(checkpoints, tree, meta | {"source": str(source.absolute())})


def export_huggingface(
    checkpoint: StoredCheckpoint,
    model: ModelConfig,
    target: Path,
    *,
    dtype: str,
    max_positions: int,
    max_shard_bytes: int,
) -> None:
    """Write the parameters of a checkpoint as config.json and safetensors of `dtype`.

    `target` must not exist, or be empty; it has its name only once it is complete. Raises
    `ConfigError` where it is neither, or the checkpoint is of another model.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} exists and is not an empty directory: choose another one to export to."
        )
    wanted = parameters(model)
    _check_stored(checkpoint, wanted)
    target = target.absolute()
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    kind = np.dtype(jnp.dtype(dtype))
    try:
        partial.mkdir(parents=True)
        text = json.dumps(config_of(model, kind, max_positions), indent=2)
        (partial / "config.json").write_text(text + "\n")
        write_tensors(
            partial,
            {own.name: own.their_shape for own in wanted},
            _converted(checkpoint, wanted),
            dtype=kind,
            max_shard_bytes=max_shard_bytes,
        )
        partial.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}): choose a directory that is writable "
            f"and has room."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_tensors(files: TensorFiles, wanted: list[Parameter], *, tied: bool) -> None:
    place, names = files.directory, set(files.names)
    for own in wanted:
        if own.name not in names:
            raise ConfigError(
                f"{place} has no tensor {own.name} though its config.json describes one: download "
                f"it again."
            )
        if files.shape(own.name) != own.their_shape:
            raise ConfigError(
                f"{place} has {own.name} of shape {files.shape(own.name)} but its config.json "
                f"describes {own.their_shape}: download it again."
            )
    unknown = names - {own.name for own in wanted}
    if tied and _HEAD in unknown:
        if not np.array_equal(files.read(_HEAD), files.read(_EMBED)):
            raise ConfigError(
                f"{place} has a {_HEAD} that differs from {_EMBED} though its config.json says "
                f"tie_word_embeddings: set that to false there, and model.tie_embeddings=false."
            )
        unknown.remove(_HEAD)
    if unknown:
        raise ConfigError(
            f"{place} has {len(unknown)} tensors that the model has no place for "
            f"({min(unknown)} first): take a checkpoint of a plain Llama 3 or Qwen3."
        )


def _check_stored(checkpoint: StoredCheckpoint, wanted: list[Parameter]) -> None:
    want = {("params", *own.path): own.shape for own in wanted}
    have = {
        path: tuple(leaf.shape) for path, leaf in checkpoint.leaves.items() if path[0] == "params"
    }
    for path in sorted({*want, *have}):
        if want.get(path) != have.get(path):
            raise ConfigError(
                f"checkpoint {checkpoint.directory} is of another model: {'/'.join(path)} has "
                f"shape {have.get(path, 'none (absent)')} there and "
                f"{want.get(path, 'none (absent)')} in this configuration; give the configuration "
                f"that it was saved with."
            )


def _converted(
    checkpoint: StoredCheckpoint, wanted: list[Parameter]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and tensor of each parameter: ends one by one, layers one at a time."""
    for _, group in groupby(wanted, key=_unit):
        together = list(group)
        arrays = checkpoint.read([("params", *own.path) for own in together])
        while together:  # let go of an array once it is written
            own = together.pop(0)
            yield own.name, own.converted(arrays.pop(0))


def _unit(own: Parameter) -> tuple[str, ...]:
    return own.path[:2] if own.path[0] == "layers" else own.path


def _parameter(
    start: tuple[str, ...],
    path: tuple[str, ...],
    shape: Shape,
    prefix: str,
    names: dict[str, tuple[str, bool]],
) -> Parameter:
    name, transposed = names["/".join(path)]
    return Parameter((*start, *path), shape, f"{prefix}{name}.weight", transposed)


def _paths(tree: Tree) -> dict[tuple[str, ...], Shape]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {tuple(part.key for part in path): leaf.shape for path, leaf in leaves}
