"""Weights with other names, other dtypes, or fewer tensors; refusals that name causes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import (
    GPT2,
    LLAMA,
    QWEN3_MOE,
    SQUARE_MOE,
    all_tensors,
    assert_same_bytes,
    export,
    random_tensors,
    write_model,
)

import jaxpipe.checkpoint.__main__ as command
from jaxpipe.checkpoint.hf.naming import list_parameters
from jaxpipe.checkpoint.hf.parameters import convert_tensors, import_huggingface
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError
from jaxpipe.model.families.phi3 import Phi3Config


def fused(model, tensors):
    """Return a layer's experts in two tensors, `[E, 2F, D]` and `[E, D, F]`, as transformers 5."""
    found = dict(tensors)
    for layer in model.sparse_layers:
        place = f"model.layers.{layer}.mlp.experts"
        stacked = {
            name: np.stack(
                [found.pop(f"{place}.{e}.{name}_proj.weight") for e in range(model.n_experts)]
            )
            for name in ("gate", "up", "down")
        }
        gate_up = np.concatenate([stacked["gate"], stacked["up"]], axis=1)
        found |= {f"{place}.gate_up_proj": gate_up, f"{place}.down_proj": stacked["down"]}
    return found


def test_a_tensor_may_hold_parts_of_different_widths():
    """Four query heads, and two key and value heads, as Phi-3 stores them."""
    sizes = {"n_layers": 1, "d_model": 12, "n_heads": 4, "n_kv_heads": 2, "d_ff": 5}
    wanted = list_parameters(Phi3Config(**sizes, vocab_size=7))
    rng = np.random.default_rng(0)
    arrays = {one.path: rng.standard_normal(one.shape) for one in wanted}
    tensors = dict(convert_tensors(lambda paths: [arrays[path] for path in paths], wanted))
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (24, 12)
    assert tensors["model.layers.0.mlp.gate_up_proj.weight"].shape == (10, 12)
    for one in wanted:
        assert tensors[one.hf_names[0]].shape == one.hf_shape
        np.testing.assert_array_equal(one.from_hf(tensors.__getitem__), arrays[one.path])


@pytest.mark.parametrize("model", [QWEN3_MOE, SQUARE_MOE], ids=["qwen3_moe", "square_moe"])
@pytest.mark.parametrize("shards", [1, 3])
def test_experts_may_be_one_tensor(tmp_path, model, shards):
    tensors = random_tensors(model)
    assert fused(model, tensors).keys() != tensors.keys()
    source = write_model(tmp_path / "hf", model, fused(model, tensors), shards=shards)
    step = import_huggingface(source, model, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, model, tmp_path / "out")), tensors)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_transformers_own_fused_experts_are_read(tmp_path, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("experts are tensors of their own in transformers 4")
    torch.manual_seed(0)
    own = {"num_experts": 4, "moe_intermediate_size": 6} if family == "Qwen3Moe" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, **own,
    )  # fmt: skip
    theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    theirs.save_pretrained(tmp_path / "plain")
    read = {}
    for name in ("fused", "plain"):
        toml, out = str(tmp_path / f"{name}.toml"), str(tmp_path / f"{name}_c")
        words = ["import", str(tmp_path / name), "--write-config", toml, "--out", out]
        assert command.main(words) == 0
        checkpoint = StoredCheckpoint(tmp_path / f"{name}_c" / "0")
        paths = sorted(checkpoint.leaves)
        read[name] = dict(zip(paths, checkpoint.read(paths)))
    assert any("_proj" in name for name in all_tensors(tmp_path / "fused"))
    assert not all_tensors(tmp_path / "fused").keys() & {
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.block_sparse_moe.experts.0.w3.weight",
    }
    for path, leaf in read["plain"].items():
        np.testing.assert_array_equal(read["fused"][path], leaf, str(path))


RENAMED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled by layer": lambda name: name.replace(".self_attn", "._orig_mod.self_attn"),
    "peft": lambda name: f"base_model.model.{name}",
    "ddp": lambda name: f"module.{name}",
    "ddp of compiled": lambda name: f"module._orig_mod.{name}",
    "fsdp": lambda name: f"_fsdp_wrapped_module.{name.replace('mlp', '_fsdp_wrapped_module.mlp')}",
    "checkpointed": lambda name: name.replace(".mlp", "._checkpoint_wrapped_module.mlp"),
}


@pytest.mark.parametrize("wrapper", RENAMED)
@pytest.mark.parametrize("shards", [1, 3])
def test_names_may_have_those_of_wrappers(tmp_path, wrapper, shards):
    tensors = random_tensors(LLAMA)
    renamed = {RENAMED[wrapper](name): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    source = write_model(tmp_path / "hf", LLAMA, renamed, shards=shards)
    step = import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, LLAMA, tmp_path / "out")), tensors)


def test_a_wrapped_gpt2_without_its_head_and_with_masks(tmp_path):
    tensors = random_tensors(GPT2)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.tri(64, dtype=bool)[None, None]
    renamed = {f"module._orig_mod.{name}": tensor for name, tensor in bare.items()}
    source = write_model(tmp_path / "hf", GPT2, renamed)
    step = import_huggingface(source, GPT2, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, GPT2, tmp_path / "out")), tensors)


@pytest.mark.parametrize("only", ["", "q_proj"])
def test_float64_is_read_as_float32(tmp_path, only):
    tensors = random_tensors(LLAMA, np.float64)
    narrow = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    mixed = narrow | {name: tensor for name, tensor in tensors.items() if only in name}
    assert any(tensor.astype(np.float32).astype(float).tobytes() != tensor.tobytes() for tensor in
               tensors.values())  # fmt: skip
    source = write_model(tmp_path / "hf", LLAMA, mixed, torch_dtype="float64")
    step = import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert {str(leaf.dtype) for leaf in StoredCheckpoint(step).leaves.values()} == {"float32"}
    assert_same_bytes(all_tensors(export(step, LLAMA, tmp_path / "out")), narrow)


GATE = "model.layers.1.mlp.gate_proj.weight"
REFUSED = {
    r"holds .*lora_A.weight, of an adapter that is not merged": lambda tensors: (
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        | {f"base_model.model.{GATE[:-7]}.lora_A.weight": np.ones((2, 32), np.float32)}
    ),
    rf"holds .*{GATE}, but .*{GATE} names the same tensor": lambda tensors: (
        tensors | {f"_orig_mod.{GATE}": tensors[GATE]}
    ),
    f"has no tensor {GATE}, which its config.json describes, and other.weight, which": (
        lambda tensors: {
            {GATE: "other.weight"}.get(name, name): tensor for name, tensor in tensors.items()
        }
    ),
    f"holds {GATE} as F8_E4M3 of shape .*, whose scales": lambda tensors: (
        tensors | {GATE: tensors[GATE].astype(jnp.float8_e4m3fn)}
    ),
    f"holds {GATE} as I32 but only": lambda tensors: (
        tensors | {GATE: tensors[GATE].astype(np.int32)}
    ),
    f"has {GATE} of shape .* take config.json and weights of the same model": lambda tensors: (
        tensors | {GATE: tensors[GATE][:-1].copy()}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refusal_names_the_cause(tmp_path, message):
    source = write_model(tmp_path / "hf", LLAMA, REFUSED[message](random_tensors(LLAMA)))
    with pytest.raises(ConfigError, match=message) as raised:
        import_huggingface(source, LLAMA, tmp_path / "c", {})
    assert "download" not in str(raised.value)
    assert "quantised" not in str(raised.value)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd"])
def test_an_index_names_files_beside_it(tmp_path, shard):
    source = write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA), shards=3)
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][GATE] = shard
    index.write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match="which is no file of its directory"):
        import_huggingface(source, LLAMA, tmp_path / "c", {})
