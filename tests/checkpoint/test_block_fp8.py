"""Weights in 8-bit floats with a scale per block of 128 x 128 are read as their products."""

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import QWEN3, QWEN3_MOE, random_tensors, write_model
from msgspec.structs import replace
from safetensors.numpy import save_file

from jaxpipe.checkpoint.hf.naming import list_parameters
from jaxpipe.checkpoint.hf.safetensors_directory import TensorFiles
from jaxpipe.config import ConfigError
from jaxpipe.inference.saved_model import SavedModel

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


FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.norm"],
}  # fmt: skip
LARGE = {"d_model": 130, "n_heads": 2, "n_kv_heads": 1, "head_dim": 66, "max_seq_len": 64}


@pytest.mark.parametrize(
    "model",
    [replace(QWEN3, **LARGE, d_ff=140), replace(QWEN3_MOE, **LARGE, d_expert=140)],
    ids=["qwen3", "qwen3_moe"],
)
def test_a_published_model_of_the_llama_family_is_read(tmp_path, model):
    tensors, expected = random_tensors(model), {}
    for seed, name in enumerate(sorted(tensors)):
        expected[name] = tensors[name]
        if name.endswith("proj.weight"):
            values, scales, expected[name] = quantised(tensors[name].shape, seed)
            tensors |= {name: values, f"{name}_scale_inv": scales}
    source = write_model(
        tmp_path / "hf", model, tensors, quantization_config=FP8, max_position_embeddings=64
    )
    saved = SavedModel.open(source)
    for parameter in list_parameters(saved.model):
        (found,) = saved.read([parameter.path])
        np.testing.assert_array_equal(found, parameter.from_hf(lambda name, *_: expected[name]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALES: np.ones((1, 1), np.int64)}, f"holds {SCALES} as I64 but only"),
        ({NAME: np.ones((2, 2), jnp.float8_e5m2)}, f"holds {NAME} as F8_E5M2 but only"),
    ],
)
def test_other_kinds_of_values_and_scales_are_named(tmp_path, change, message):
    tensors = {NAME: np.ones((2, 2), jnp.float8_e4m3fn), SCALES: np.ones((1, 1), np.float32)}
    save_file(tensors | change, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        TensorFiles(tmp_path).dtype(NAME)
