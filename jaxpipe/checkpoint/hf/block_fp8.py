"""Tensors of 8-bit floats with a scale per block, as DeepSeek-V3 is published.

A matrix `X.weight` in e4m3 has a matrix `X.weight_scale_inv` in float32, one value per block of 128
x 128, the last blocks of a row or column being smaller; the weight is value times scale. Source:
README_WEIGHTS.md of https://github.com/deepseek-ai/DeepSeek-V3.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxpipe.config import ConfigError

KIND = "F8_E4M3"  # safetensors' name of the dtype
SCALE = "_scale_inv"  # a tensor's name and this is the name of its scales
BLOCK = 128


def check_scales(
    name: str, shape: tuple[int, ...], scales: tuple[int, ...] | None, where: Path
) -> None:
    """Raise `ConfigError` unless `scales` is the shape of the scales of a tensor of this shape."""
    blocks = tuple(-(-size // BLOCK) for size in shape)
    if len(shape) != 2 or scales != blocks:
        actual = "which is absent" if scales is None else f"which has the shape {scales}"
        raise ConfigError(
            f"{where} holds {name} as {KIND} of shape {shape}, whose scales {name}{SCALE}, "
            f"{actual}, must be a matrix of one value per block of {BLOCK} x {BLOCK}: take the "
            f"published files, or a checkpoint in bfloat16."
        )


def read_e4m3(path: Path, name: str) -> np.ndarray:
    """Read a tensor of e4m3 from a file of safetensors, whose NumPy interface lacks the dtype."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        data = file.read(end - begin)
    return np.frombuffer(data, jnp.float8_e4m3fn).reshape(entry["shape"])


def scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights, in float32: every value times the scale of its block.

    >>> values, scales = np.ones((129, 2), np.float32), np.array([[2.0], [3.0]], np.float32)
    >>> scaled(values, scales)[[0, 127, 128]].tolist()
    [[2.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
    """
    weights = values.astype(np.float32)
    for i, row in enumerate(scales):
        for j, scale in enumerate(row):
            weights[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scale
    return weights
