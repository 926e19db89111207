"""Scaled rotary positions against transformers' own functions, from the same config.json."""

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import our_logits, stored_params
from msgspec.structs import replace

from jaxpipe.checkpoint.hf.parameters import export_huggingface, import_huggingface, model_settings
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.rope import huggingface
from jaxpipe.model.layers.rope.rotate import rotary_frequencies

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
_DEEPSEEK = _YARN | {"beta_fast": 32, "beta_slow": 1}
_LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + 0.01 * i for i in range(32)],
    "long_factor": [1 + 2.0 * i for i in range(32)],
}
# rope_theta and rope_scaling; names say what a case has that others do not.
SCALINGS = {
    "linear": (1e4, {"rope_type": "linear", "factor": 2.5}),
    "dynamic": (1e4, {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (5e5, {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }),
    "yarn": (1e6, _YARN),
    "yarn without original positions": (1e4, {"rope_type": "yarn", "factor": 4.0}),
    "yarn without a factor": (1e4, _YARN | {"factor": None}),
    "deepseek v3": (1e4, _DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "two mscales": (1e4, _DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 0.707}),
    "one mscale": (1e4, _DEEPSEEK | {"mscale": 0.707}),
    "bounds in one pair": (5e4, _YARN | {
        "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }),
    "equal bounds": (5e4, _YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}),
    "gpt-oss": (150000, _YARN | {
        "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }),
    "attention factor": (1e4, _YARN | {"attention_factor": 0.8}),
    "longrope": (1e4, _LONG),
    "longrope, up to the original positions": (
        1e4, _LONG | {"original_max_position_embeddings": 131072, "factor": 4.0},
    ),
    "longrope, attention factor": (1e4, _LONG | {"attention_factor": 1.2}),
    "short positions": (1e4, _YARN | {"original_max_position_embeddings": 16}),
}  # fmt: skip
SIZES = {"n_layers": 2, "d_model": 48, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "vocab_size": 96}


def config_of(theta, scaling, **changes):
    """Return transformers' configuration of a small Llama."""
    return transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=48, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=96, max_position_embeddings=65536, initializer_range=0.15,
        rope_parameters=scaling | {"rope_theta": theta}, **{"head_dim": 64} | changes,
    )  # fmt: skip


def our_config(theirs):
    """Return the same model's `[model]`."""
    return LlamaConfig(
        **model_settings(theirs.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "d")
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor(name):
    theirs = config_of(*SCALINGS[name])
    ours = our_config(theirs)
    find = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[SCALINGS[name][1]["rope_type"]]
    frequencies, factor = find(theirs, seq_len=theirs.max_position_embeddings)
    found = rotary_frequencies(ours, 64, jnp.float32)
    np.testing.assert_allclose(found, frequencies.numpy(), rtol=2e-6)
    assert ours.rotary_scale == pytest.approx(factor, rel=1e-15)
    assert not list(ours.broken_rules(tp=1))


@pytest.mark.parametrize("name", SCALINGS)
def test_what_is_written_is_what_was_read(name):
    theirs = config_of(*SCALINGS[name])
    ours = our_config(theirs)
    written = huggingface.written(ours, 65536) | {"max_position_embeddings": 65536}
    again = huggingface.expected(written)
    assert {field: getattr(ours, field) for field in again} == again
    assert again == huggingface.expected(theirs.to_dict())


def test_logits_of_a_llama_with_yarn(tmp_path):
    """Positions beyond the original ones; transformers loads what is exported."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = config_of(1e4, scaling | {"beta_fast": 2.0, "beta_slow": 0.5}, head_dim=12)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    ours = replace(our_config(config))
    tokens = np.random.default_rng(0).integers(0, 96, (2, 31))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    step = import_huggingface(tmp_path / "hf", ours, tmp_path / "c", {})
    np.testing.assert_allclose(our_logits(ours, stored_params(step), tokens), want, 1e-5, 1e-5)
    export_huggingface(
        StoredCheckpoint(step), ours, tmp_path / "out", dtype="float32", max_positions=65536,
        max_shard_bytes=10**9, serving=ServingFiles(),
    )  # fmt: skip
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.from_numpy(tokens)).logits.numpy(), want)
