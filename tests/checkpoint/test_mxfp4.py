"""gpt-oss's files, whose experts are in MXFP4: what their bytes mean, and imports of them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import all_tensors, assert_same_bytes, export
from safetensors.numpy import save_file

from jaxpipe.checkpoint.hf import mxfp4
from jaxpipe.checkpoint.hf.naming import list_parameters
from jaxpipe.checkpoint.hf.parameters import hf_format, import_huggingface
from jaxpipe.checkpoint.hf.safetensors_directory import TensorFiles
from jaxpipe.config import ConfigError
from jaxpipe.model.families.gpt_oss.config import GptOssConfig

MODEL = GptOssConfig(
    n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=32, vocab_size=48, n_experts=3,
    experts_per_token=2,
)  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts"


def quantised(shape, seed=0):
    """Return random blocks and scales of a matrix `[E, in, out]`."""
    rng, (e, inputs, outputs) = np.random.default_rng(seed), shape
    blocks = rng.integers(0, 256, (e, outputs, inputs // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(100, 140, blocks.shape[:-1], dtype=np.uint8)


def tensors_of(model):
    """Return the tensors of a model by name in bfloat16, and the same with experts in MXFP4."""
    rng, plain, packed = np.random.default_rng(1), {}, {}
    for seed, parameter in enumerate(list_parameters(model)):
        (name,), shape = parameter.hf_names, parameter.hf_shape
        if len(shape) < 3:
            plain[name] = packed[name] = rng.standard_normal(shape).astype(jnp.bfloat16)
        elif name not in plain:
            blocks, scales = quantised(shape, seed)
            plain[name] = np.ascontiguousarray(mxfp4.dequantise(blocks, scales))
            packed |= {name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: scales}
    return plain, packed


def write(directory, tensors):
    directory.mkdir()
    written = hf_format(MODEL).written(MODEL, "bfloat16", 64)
    about = written | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(about))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_values_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = quantised((3, 64, 96))
    assert len(np.unique(blocks)) == 256
    want = theirs.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    assert want.shape == (3, 64, 96)
    got = mxfp4.dequantise(blocks, scales)
    np.testing.assert_array_equal(got.astype(np.float32), want.float().numpy())


def test_a_model_in_mxfp4_is_imported_and_exported_in_bfloat16(tmp_path):
    plain, packed = tensors_of(MODEL)
    step = import_huggingface(write(tmp_path / "hf", packed), MODEL, tmp_path / "c", {})
    out = export(step, MODEL, tmp_path / "out", dtype="bfloat16")
    assert_same_bytes(all_tensors(out), plain)
    again = import_huggingface(out, MODEL, tmp_path / "again", {})
    assert_same_bytes(all_tensors(export(again, MODEL, tmp_path / "out2", dtype="bfloat16")), plain)


def test_experts_are_read_one_by_one(tmp_path, monkeypatch):
    """So that an import holds one parameter, and one expert of the matrices that it is part of."""
    source, sizes = write(tmp_path / "hf", tensors_of(MODEL)[1]), []
    dequantise = mxfp4.dequantise

    def seen(blocks, scales):
        sizes.append(blocks.shape)
        return dequantise(blocks, scales)

    monkeypatch.setattr(mxfp4, "dequantise", seen)
    import_huggingface(source, MODEL, tmp_path / "c", {})
    assert {*sizes} == {(64, 2, 16), (64, 1, 16)}
    assert len(sizes) == MODEL.n_layers * MODEL.n_experts * 3  # gate, up and down


REFUSED = {
    f"has no tensor {EXPERTS}.down_proj, which its config.json describes, and": lambda tensors: (
        {name: x for name, x in tensors.items() if name != f"{EXPERTS}.down_proj_scales"}
    ),
    rf"has {EXPERTS}.down_proj in MXFP4 with blocks \(3, 64, 1, 16\) and scales \(3, 64\)": (
        lambda tensors: (
            tensors
            | {f"{EXPERTS}.down_proj_scales": tensors[f"{EXPERTS}.down_proj_scales"][..., 0].copy()}
        )
    ),
    "holds model.norm.weight as U8 but only": lambda tensors: (
        tensors | {"model.norm.weight": np.ones(64, np.uint8)}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_pair_of_blocks_and_scales_is_refused(tmp_path, message):
    source = write(tmp_path / "hf", REFUSED[message](tensors_of(MODEL)[1]))
    with pytest.raises(ConfigError, match=message):
        import_huggingface(source, MODEL, tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_a_matrix_has_the_dtype_and_shape_that_it_is_read_in(tmp_path):
    plain, packed = tensors_of(MODEL)
    files = TensorFiles(write(tmp_path / "hf", packed))
    assert {*files.names} == {*plain}
    for name, tensor in plain.items():
        assert (files.shape(name), files.dtype(name)) == (tensor.shape, tensor.dtype)
        np.testing.assert_array_equal(files.read(name), tensor)
