"""Adapters that PEFT reads and writes, against merged weights and PEFT's logits."""

import dataclasses
import re

import numpy as np
import pytest
from hf_models import our_logits
from trained_models import VOCABULARY, logits_of, published

from jaxpipe.checkpoint.hf.adapters import adapter_paths, export_adapters
from jaxpipe.checkpoint.hf.naming import list_parameters
from jaxpipe.checkpoint.hf.peft_reading import read_adapters
from jaxpipe.checkpoint.hf.peft_settings import HARMLESS, PLAIN, UNDERSTOOD, refusal
from jaxpipe.config import ConfigError, LoraConfig
from jaxpipe.inference.saved_model import SavedModel

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
LORA = LoraConfig(rank=3, alpha=6.0, dropout=0.1)
MODELS = "llama", "v2_lite", "v3"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which peft calls
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", [True, False])
def test_peft_adds_what_is_merged_here(tmp_path, name, attention):
    theirs, directory = published(name)
    model, rng = SavedModel.open(directory).model, np.random.default_rng(0)
    adapters, merged = {}, {}
    for one in list_parameters(model):
        if len(one.shape) != 2 or one.path[0] != "layers" or "router" in one.path:
            continue
        if one.path[2] == "attn" and not attention:
            continue
        paths = adapter_paths(one.path)
        shapes = (one.shape[0], LORA.rank), (LORA.rank, one.shape[1])
        a, b = (rng.normal(0, 0.2, shape).astype(np.float32) for shape in shapes)
        adapters |= {paths.a: a, paths.b: b}
        merged[one.hf_names[0]] = torch.from_numpy(2 * (a @ b).T)
    count = export_adapters(
        lambda paths: [adapters[path] for path in paths], adapters.__contains__, model, LORA,
        tmp_path / "peft",
    )  # fmt: skip
    assert count == len(merged)
    again = read_adapters(
        tmp_path / "peft", model, LORA, lambda read: read([*adapters]), seed=0, say=pytest.fail
    )
    for ours, back in zip(adapters.values(), again, strict=True):
        np.testing.assert_array_equal(back, ours)
    tokens = rng.integers(0, VOCABULARY, (2, 17))
    before = logits_of(theirs, tokens)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        for key, weight in base.named_parameters():
            if key in merged:
                weight += merged.pop(key)
    assert not merged
    expected = logits_of(base, tokens)
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(directory), tmp_path / "peft"
    ).eval()
    np.testing.assert_allclose(logits_of(adapted, tokens), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - before).max() > 0.1


REFUSED = {
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias",
    "megatron_config", "modules_to_save", "monteclora_config", "trainable_token_indices",
    "use_bdlora", "use_dora", "use_qalora", "velora_config",
}  # fmt: skip
OTHER_BASE = {"olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq", "mica"}


def test_every_setting_of_the_installed_peft_is_known():
    names = {one.name for one in dataclasses.fields(peft.LoraConfig)}
    assert names - HARMLESS - UNDERSTOOD - PLAIN.keys() <= REFUSED
    defaults = peft.LoraConfig(target_modules=["q_proj"]).to_dict()
    assert refusal({**defaults, "peft_type": "LORA", "target_modules": ["q_proj"]}) == ""
    field = next(
        one for one in dataclasses.fields(peft.LoraConfig) if one.name == "init_lora_weights"
    )
    written = set(re.findall(r"'([^']*)'", str(field.type)))
    assert written <= OTHER_BASE | set(PLAIN["init_lora_weights"][1:])
    assert all(refusal({"init_lora_weights": value}) for value in OTHER_BASE)


def test_kinds_that_peft_cannot_merge_have_another_remedy():
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as tuners
    from peft.tuners.tuners_utils import BaseTuner

    for kind in peft.PeftType:
        can_merge = kind in tuners and issubclass(tuners[kind], BaseTuner)
        if not can_merge:
            assert "cannot save it merged" in refusal({"peft_type": kind.value}), kind


NAMES = {"q_proj": ("attn", "wq"), "v_proj": ("attn", "wv")}
TAKEN = [
    {}, {"use_rslora": True}, {"layers_to_transform": [1]}, {"layers_to_transform": 0},
    {"layers_to_transform": [0], "layers_pattern": "layers"}, {"lora_dropout": 0.5},
    {"exclude_modules": ["layers.0.self_attn.v_proj"]}, {"exclude_modules": ".*0.self_attn.q.*"},
    {"target_modules": r".*\.1\..*\.(q|v)_proj"}, {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"}, {"init_lora_weights": False}, {"bias": "all"},
    {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 8}},
]  # fmt: skip
NOT_TAKEN = [
    {"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"}, {"init_lora_weights": "mica"}, {"use_dora": True},
    {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"v_proj": 2}}, {"lora_bias": True},
    {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"embed_tokens": [3, 4]}},
    {"alora_invocation_tokens": [3]}, {"use_qalora": True},
]  # fmt: skip


def adapted(folder, **settings):
    """Save a random adapter of a small Llama by PEFT; return its logits, tokens and the model."""
    _, directory = published("llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "v_proj"]} | settings
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 17))
    again = peft.PeftModel.from_pretrained(base, folder).eval()
    return logits_of(again, tokens), tokens, SavedModel.open(directory)


def merged_logits(saved, adapters, scale, tokens):
    """Return the logits of a saved model with adapters by path."""
    params = {}
    for one in list_parameters(saved.model):
        (weight,) = saved.read([one.path])
        if (pair := adapter_paths(one.path)).a in adapters:
            weight = weight + scale * adapters[pair.a] @ adapters[pair.b]
        node = params
        for key in one.path[:-1]:
            node = node.setdefault(key, {})
        node[one.path[-1]] = weight
    return our_logits(saved.model, params, tokens)


def read(folder, saved):
    lora = LoraConfig(rank=4, alpha=8.0, targets=tuple(name for _, name in NAMES.values()))
    paths = [
        path
        for one in list_parameters(saved.model)
        if one.path[2:] in NAMES.values()
        for path in adapter_paths(one.path)
    ]
    return read_adapters(
        folder, saved.model, lora, lambda read: dict(zip(paths, read(paths))), seed=0, say=print
    )


@pytest.mark.filterwarnings("ignore")  # of transformers and peft
@pytest.mark.parametrize("settings", TAKEN, ids=str)
def test_adapters_that_peft_wrote_have_its_logits(tmp_path, settings):
    expected, tokens, saved = adapted(tmp_path, **settings)
    found = merged_logits(saved, read(tmp_path, saved), 2.0, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore")  # of transformers and peft
@pytest.mark.parametrize("settings", NOT_TAKEN, ids=str)
def test_other_adapters_of_peft_are_refused_by_name(tmp_path, settings):
    _, _, saved = adapted(tmp_path, **settings)
    with pytest.raises(ConfigError, match=f"adapter_config.json has {min(settings)}="):
        read(tmp_path, saved)
