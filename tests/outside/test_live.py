"""The records equal what transformers and torch give today; needs both (`pip install '.[hf]'`)."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import record_transformers as record  # noqa: E402
import transformers_records as records  # noqa: E402

MODELS = list(record.MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_what_was_recorded(name):
    """In float64; the record has parameters in float32."""
    kept, made = records.read(name).arrays, record.recorded(name)
    assert kept.keys() == made.keys()
    for key in ("shapes", "tokens", "ignored", "weights"):
        np.testing.assert_array_equal(kept[key], made[key], key)
    for key in {"gradients", "adamw_losses", "muon_losses"} & kept.keys():
        np.testing.assert_allclose(made[key], kept[key], rtol=1e-10, atol=1e-13, err_msg=key)
    for key in {"adamw", "muon"} & kept.keys():
        np.testing.assert_allclose(made[key], kept[key], rtol=2e-7, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_its_code_as_it_is_gives_the_same_in_float32(name):
    """So `record.float64` changes the precision of transformers, and nothing else."""
    kept = records.read(name)
    model = record.build(name)
    assert model.dtype == torch.float32
    tokens, ignored = record.batches()
    loss, gradients = record.loss_and_gradients(
        model, kept.by_their_names("weights"), tokens[0], ignored[0]
    )
    np.testing.assert_allclose(loss, kept.arrays["adamw_losses"][0], rtol=1e-6)
    for key, want in kept.by_their_names("gradients").items():
        np.testing.assert_allclose(gradients[key], want, rtol=1e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_its_files_are_the_records_model(tmp_path, name):
    """Names and shapes of the record are those that `save_pretrained` writes, but for buffers."""
    from safetensors.numpy import load_file

    model = record.build(name)
    model.save_pretrained(tmp_path)
    found, buffers = load_file(tmp_path / "model.safetensors"), dict(model.named_buffers())
    found = {key: tensor for key, tensor in found.items() if key not in buffers}
    kept = records.read(name).by_their_names("weights")
    assert {key: tensor.shape for key, tensor in found.items()} == {
        key: tensor.shape for key, tensor in kept.items()
    }
