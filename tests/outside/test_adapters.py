"""Exported adapters, which PEFT adds to transformers' models, against merged weights."""

import numpy as np
import pytest
from trained_models import VOCABULARY, logits_of, published

from jaxpipe.checkpoint.adapters import adapter_paths, export_adapters
from jaxpipe.checkpoint.naming import list_parameters
from jaxpipe.config import LoraConfig
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
