"""adapter_config.json is understood, or refused by the name of the setting."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import LLAMA, QWEN3_MOE
from safetensors.numpy import save_file

from jaxpipe.checkpoint.hf.adapters import FILE, SETTINGS
from jaxpipe.checkpoint.hf.peft_reading import read_adapters
from jaxpipe.config import ConfigError, LoraConfig
from jaxpipe.model import FAMILIES
from jaxpipe.model.layers.lora import Adapters, LoraDecoder

LORA = LoraConfig(rank=4, alpha=8.0, targets=("wq",))
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
SEED = 3


def matrices(layers=range(3), module="model.layers.{}.self_attn.q_proj", width=32):
    """Return the adapters of a module of some layers, as PEFT names them."""
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.{module.format(i)}.lora_{kind}.weight": rng.normal(size=shape)
        .astype(np.float32)
        for i in layers
        for kind, shape in {"A": (4, width), "B": (width, 4)}.items()
    }  # fmt: skip


def read(folder, settings, tensors, lora=LORA, model=LLAMA):
    """Return the adapters of `attn/wq` by layer and matrix, and what was reported."""
    folder.mkdir(exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(PLAIN | settings))
    save_file(tensors, folder / FILE)
    paths, said = [("layers", str(i), "lora", "attn", "wq", m) for i in range(3) for m in "ab"], []
    arrays = read_adapters(
        folder, model, lora, lambda read: read(paths), seed=SEED, say=said.append
    )
    return {path[1] + path[-1]: array for path, array in zip(paths, arrays)}, said


def product(tensors, layer, scale, module="model.layers.{}.self_attn.q_proj"):
    name = f"base_model.model.{module.format(layer)}"
    a, b = (tensors[f"{name}.lora_{kind}.weight"] for kind in "AB")
    return scale * (b @ a).T


def assert_products(found, tensors, scale, layers=range(3), **names):
    for i in layers:
        ours = LORA.alpha / LORA.rank * found[f"{i}a"] @ found[f"{i}b"]
        np.testing.assert_allclose(ours, product(tensors, i, scale, **names), rtol=1e-5, atol=1e-6)


HARMLESS = [
    {"init_lora_weights": value} for value in (True, False, None, "gaussian", "eva", "orthogonal")
] + [
    {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "future": None, "new": []},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.self_attn.q_proj": 8}},
    {"bias": "lora_only", "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "inference_mode": True},
    {"target_modules": "all-linear"}, {"target_modules": r".*\.q_proj", "eva_config": {"rho": 2}},
]  # fmt: skip


@pytest.mark.parametrize("settings", HARMLESS, ids=str)
def test_harmless_settings_do_not_matter(tmp_path, settings):
    tensors = matrices()
    found, said = read(tmp_path, settings, tensors)
    assert_products(found, tensors, 2.0)
    assert not said


REFUSED = [
    *({"init_lora_weights": value} for value in (
        "pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "mica", "Future", 1)),
    {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}},
    {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"layer_replication": [[0, 2], [1, 3]]},
    {"trainable_token_indices": [3]}, {"alora_invocation_tokens": [3]}, {"use_qalora": True},
    {"kasa_config": {"beta": 1}}, {"velora_config": {"scale": 1}}, {"arrow_config": {"top_k": 1}},
    {"monteclora_config": {"num_samples": 8}}, {"use_bdlora": {"nblocks": 2}},
    {"megatron_config": {"a": 1}}, {"bias": "other"}, {"peft_type": "LOHA"},
    {"peft_type": "ADALORA"}, {"target_parameters": ["mlp.experts.gate_up_proj"]},
    {"scaling_of_the_future": 0.5}, {"use_something": True}, {"rank_pattern": [1]},
]  # fmt: skip


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_what_is_not_a_plain_adapter_is_refused_by_name(tmp_path, settings):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, settings, matrices())
    assert f"{SETTINGS} has {name}={value!r}" in str(caught.value)
    assert "merge" in str(caught.value)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "XLORA"])
def test_what_cannot_be_merged_has_another_remedy(tmp_path, kind):
    with pytest.raises(ConfigError, match=rf"peft_type='{kind}', .* train plain adapters instead"):
        read(tmp_path, {"peft_type": kind}, matrices())


def test_adapters_may_be_of_half_precision(tmp_path):
    narrow = {name: tensor.astype(jnp.bfloat16) for name, tensor in matrices().items()}
    found, _ = read(tmp_path, {}, narrow)
    wide = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    assert_products(found, wide, 2.0)


def test_the_factor_of_rank_stabilised_adapters(tmp_path):
    settings, tensors = {"use_rslora": True}, matrices()
    found, _ = read(tmp_path, settings, tensors)  # with b times sqrt(rank)
    assert_products(found, tensors, 8 / np.sqrt(4))
    same = LoraConfig(rank=4, alpha=16.0, targets=("wq",))
    found, _ = read(tmp_path, settings, tensors, same)
    np.testing.assert_array_equal(found["1b"].T, tensors[
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    ])  # fmt: skip
    other = LoraConfig(rank=4, alpha=4.0, targets=("wq",))
    with pytest.raises(ConfigError, match="lora_alpha=8 and use_rslora, .*: set lora.alpha=16.0"):
        read(tmp_path, settings, tensors, other)
    with pytest.raises(ConfigError, match="r=4, but lora.rank=2: set lora.rank=4"):
        read(tmp_path, {}, tensors, LoraConfig(rank=2, alpha=8.0))
    with pytest.raises(ConfigError, match="has lora_alpha=None, which is no number: correct it"):
        read(tmp_path, {"lora_alpha": None}, tensors)


SOME_LAYERS = [
    {"layers_to_transform": [0, 2]}, {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    {"layers_to_transform": [0, 2], "layers_pattern": ["h", "layers"]},
    {"exclude_modules": ["layers.1.self_attn.q_proj"]}, {"exclude_modules": r".*\.1\..*"},
    {"target_modules": r"model\.layers\.[02]\.self_attn\.q_proj"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SOME_LAYERS, ids=str)
def test_layers_without_adapters_start_anew(tmp_path, settings):
    tensors = matrices([0, 2])
    found, said = read(tmp_path, settings, tensors)
    assert_products(found, tensors, 2.0, layers=[0, 2])
    assert not found["1b"].any()
    decoder = LoraDecoder(FAMILIES["llama"].build(LLAMA), Adapters(4, 8.0, ("wq",)))
    fresh = decoder.init_layer(jax.random.key(SEED), 1)["lora"]["attn"]["wq"]["a"]
    np.testing.assert_array_equal(found["1a"], fresh)  # so that b has a gradient
    assert "leaves 1 weights without adapters" in said[0]
    assert "model.layers.1.self_attn.q_proj" in said[0]


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        ({}, [0, 2], "has no .*layers.1.self_attn.q_proj.lora_A.weight: leave wq out of"),
        ({"layers_to_transform": 0}, [], "has no .*layers.0.*leave wq out of lora.targets"),
        ({"layers_to_transform": [0, 1]}, [0, 2], "has no .*layers.1.self_attn.q_proj.lora_A"),
        ({"layers_to_transform": [0]}, [0, 2], "layers.2.*, which PEFT would not read by"),
        ({"target_modules": "(", "lora_bias": False}, [0, 2], "cannot be read .*: correct target"),
    ],
)
def test_settings_and_adapters_must_agree(tmp_path, settings, layers, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, settings, matrices(layers))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (matrices(module="model.layers.{}.self_attn.v_proj"), "v_proj.* add wv to lora.targets"),
        (matrices([0], "lm_head"), "lm_head.lora_A.weight.* give adapters of the layers of this"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.bias": np.ones(2, np.float32)},
         r"q_proj.bias \(bias='all'\)"),
    ],
)  # fmt: skip
def test_other_tensors_are_named(tmp_path, extra, message):
    settings = {"bias": "all", "target_modules": ["q_proj", "v_proj", "lm_head"]}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, settings, matrices() | extra)


@pytest.mark.parametrize("base", ["model.language_model.", "language_model.model.", ""])
def test_the_text_model_of_another_one(tmp_path, base):
    module = f"{base}layers.{{}}.self_attn.q_proj"
    tensors = matrices([0, 2], module)
    found, _ = read(tmp_path, {"layers_to_transform": [0, 2]}, tensors)
    assert_products(found, tensors, 2.0, layers=[0, 2], module=module)


@pytest.mark.parametrize("content", ["[1]", "null", "{", "[" * 100_000])
def test_settings_that_are_no_table_are_one_sentence(tmp_path, content):
    save_file(matrices(), tmp_path / FILE)
    (tmp_path / SETTINGS).write_text(content)
    with pytest.raises(ConfigError, match="holds no adapters in PEFT's format"):
        read_adapters(tmp_path, LLAMA, LORA, lambda read: None, seed=0, say=print)


def test_experts_of_one_layer_have_one_shape(tmp_path):
    name = "model.layers.{}.mlp.experts.{{}}.up_proj".format
    lora = LoraConfig(rank=4, alpha=8.0, targets=("expert_up",))
    d, f, sparse = QWEN3_MOE.d_model, QWEN3_MOE.d_expert, QWEN3_MOE.sparse_layers[0]
    tensors = {}
    for i in range(QWEN3_MOE.n_experts):
        module = f"base_model.model.{name(sparse).format(i)}"
        tensors |= {
            f"{module}.lora_A.weight": np.ones((4, d + (i == 1)), np.float32),
            f"{module}.lora_B.weight": np.ones((f, 4), np.float32),
        }
    (tmp_path / SETTINGS).write_text(json.dumps(PLAIN | {"target_modules": ["up_proj"]}))
    save_file(tensors, tmp_path / FILE)
    path = ("layers", str(sparse), "lora", "moe", "experts", "w_up", "a")
    with pytest.raises(ConfigError, match=r"experts.1.up_proj.lora_A.weight of another shape"):
        read_adapters(tmp_path, QWEN3_MOE, lora, lambda read: read([path]), seed=0, say=print)
