"""Weights in 8-bit floats with a scale per block of 128 x 128 are read as their products."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpipe.checkpoint.safetensors_directory import TensorFiles
from jaxpipe.config import ConfigError

NAME, SCALES = "model.w.weight", "model.w.weight_scale_inv"


def quantised(shape, seed=0):
    """Return e4m3 values, scales of their blocks, and the weights by a padded array of blocks."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, [-(-size // 128) for size in shape]).astype(np.float32)
    padded = np.zeros([128 * size for size in scales.shape], np.float32)
    padded[: shape[0], : shape[1]] = values.astype(np.float32)
    blocks = padded.reshape(scales.shape[0], 128, scales.shape[1], 128)
    weights = (blocks * scales[:, None, :, None]).reshape(padded.shape)
    return values, scales, weights[: shape[0], : shape[1]]


@pytest.mark.parametrize("shape", [(128, 256), (130, 300), (5, 129), (256, 7)])
def test_every_block_has_its_scale(tmp_path, shape):
    values, scales, weights = quantised(shape)
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"other": plain, NAME: values, SCALES: scales}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert sorted(files.names) == [NAME, "other"]
    assert (files.shape(NAME), files.dtype(NAME)) == (shape, np.float32)
    np.testing.assert_array_equal(files.read(NAME), weights)
    np.testing.assert_array_equal(files.read("other"), plain)


@pytest.mark.parametrize("scales", [None, (1, 1)])
def test_scales_that_do_not_fit_are_one_sentence(tmp_path, scales):
    values, _, _ = quantised((130, 128))
    held = {} if scales is None else {SCALES: np.ones(scales, np.float32)}
    save_file({NAME: values} | held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="must be a matrix of one value per block of 128 x 128"):
        TensorFiles(tmp_path)
