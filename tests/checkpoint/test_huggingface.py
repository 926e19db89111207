"""Hugging Face checkpoints in and out: numbers, layouts and bytes."""

import json

import hf_models as hf
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from hf_models import (
    GPT2,
    LLAMA,
    MODELS,
    QWEN3,
    QWEN3_MOE,
    all_tensors,
    assert_same_bytes,
    export,
    imported,
    random_tensors,
    write_model,
)
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxpipe.checkpoint import StateKeying, read_state
from jaxpipe.checkpoint.hf.parameters import (
    hf_format,
    import_huggingface,
    list_parameters,
    training_settings,
)
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.core.mesh import Sharding, StageLayout, make_mesh
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.runtime.group import Group

TOKENS = np.random.default_rng(1).integers(0, 32, (2, 9))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_published_equations(tmp_path, name):
    model, tensors = MODELS[name], random_tensors(MODELS[name])
    step = import_huggingface(
        write_model(tmp_path / "hf", model, tensors), model, tmp_path / "c", {}
    )
    ours = hf.our_logits(model, hf.stored_params(step), TOKENS)
    np.testing.assert_allclose(
        ours, hf.reference_logits(model, tensors, TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_import_then_export_gives_the_same_bytes(tmp_path, name, shards):
    model, tensors = MODELS[name], random_tensors(MODELS[name])
    source = write_model(tmp_path / "hf", model, tensors, shards=shards)
    step = import_huggingface(source, model, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, model, tmp_path / "out")), tensors)


def test_a_gpt2_may_lack_its_first_name_and_have_masks(tmp_path):
    """As in published checkpoints."""
    tensors = random_tensors(GPT2)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{i}.attn.bias": np.tri(64, dtype=bool)[None, None] for i in range(2)}
    old = {"h.0.attn.masked_bias": np.full((), -1e4, np.float32)}
    source = write_model(tmp_path / "hf", GPT2, bare | masks | old, shards=2)
    step = import_huggingface(source, GPT2, tmp_path / "c", {})
    assert_same_bytes(all_tensors(export(step, GPT2, tmp_path / "out")), tensors)


def test_versions_of_transformers_write_the_number_of_experts_differently(tmp_path):
    tensors, fields = random_tensors(QWEN3_MOE), {"num_experts": ..., "num_local_experts": 6}
    source = write_model(tmp_path / "hf", QWEN3_MOE, tensors, **fields)
    step = import_huggingface(source, QWEN3_MOE, tmp_path / "c", {})
    out = export(step, QWEN3_MOE, tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    want = hf.config_json(QWEN3_MOE) | {"router_aux_loss_coef": 0.0}
    assert {name: written[name] for name in want} == want
    assert_same_bytes(all_tensors(out), tensors)


def test_a_coefficient_of_the_routers_loss_means_the_same(tmp_path):
    """transformers' loss is K for even loads, ours 1 in each of S layers: K = 2 here, S = 1.

    So a coefficient c is c K / S of ours; an import reports it if the run has another one.
    """
    trained = replace(QWEN3_MOE, n_layers=8, router_aux_loss=0.03)  # sparse: 3, 5 and 7
    written = hf_format(trained).written(trained.resolved(), "float32", 64)
    assert written["router_aux_loss_coef"] == pytest.approx(0.03 * 3 / 2, rel=1e-12)
    source = tmp_path / "hf"
    write_model(source, trained, random_tensors(trained), **written)
    assert training_settings(source, trained) == {}
    found = training_settings(source, replace(trained, router_aux_loss=0.5))
    assert found == {"router_aux_loss": pytest.approx(0.03, rel=1e-12)}
    assert (
        training_settings(write_model(tmp_path / "dense", LLAMA, random_tensors(LLAMA)), LLAMA)
        == {}
    )


def test_bfloat16_stays_what_it_is(tmp_path):
    tensors = random_tensors(LLAMA, jnp.bfloat16)
    step = imported(tmp_path, LLAMA, tensors)
    assert {str(leaf.dtype) for leaf in StoredCheckpoint(step).leaves.values()} == {"bfloat16"}
    assert_same_bytes(
        all_tensors(export(step, LLAMA, tmp_path / "same", dtype="bfloat16")), tensors
    )
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same_bytes(all_tensors(export(step, LLAMA, tmp_path / "wide")), wide)


def test_shards_are_no_larger_than_asked_and_listed_in_the_index(tmp_path):
    tensors = random_tensors(LLAMA)
    step = import_huggingface(
        write_model(tmp_path / "hf", LLAMA, tensors), LLAMA, tmp_path / "c", {}
    )
    out = export(step, LLAMA, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        held = load_file(out / file)
        assert {index["weight_map"][name] for name in held} == {file}
        assert sum(tensor.nbytes for tensor in held.values()) <= 20_000
        with safe_open(out / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    again = import_huggingface(out, LLAMA, tmp_path / "again", {})
    assert_same_bytes(all_tensors(export(again, LLAMA, tmp_path / "out2")), tensors)


def staged_shapes(model, layout, sharding):
    """Return the shapes of stage-stacked parameters, which a run restores into."""
    decoder, key = LlamaDecoder(model), jax.random.key(0)
    layers = jax.eval_shape(
        lambda: layout.stack([decoder.init_layer(key, i) for i in range(model.n_layers)])
    )
    shapes = {"embed_head": jax.eval_shape(decoder.init_embed_head, key), "layers": layers}
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        shapes,
        sharding.named_shardings(shapes),
    )


@pytest.mark.parametrize(("counts", "dp"), [((3,), 1), ((2, 1), 2), ((1, 1, 1), 1)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_any_layout_restores_the_parameters_alone(tmp_path, counts, dp, dtype):
    tensors = random_tensors(LLAMA, dtype)
    step = import_huggingface(
        write_model(tmp_path / "hf", LLAMA, tensors), LLAMA, tmp_path / "c", {}
    )
    layout = StageLayout(counts)
    sharding = Sharding(make_mesh(len(counts), dp, devices=jax.devices()[: len(counts) * dp]))
    keying = StateKeying(layout, sharding)
    like = {"params": staged_shapes(LLAMA, layout, sharding)}
    state, meta = read_state(step, keying, like, group=Group())
    assert (meta["kind"], meta["step"], meta["position"]) == ("params", 0, 0)
    params = keying.to_keyed(state)["params"]
    jax.tree.map(
        lambda have, want: np.testing.assert_array_equal(have, want.astype(np.float32)),
        params,
        hf.stored_params(step),
    )


def test_a_checkpoint_of_a_run_is_exported_without_its_moments(tmp_path):
    wanted = list_parameters(QWEN3)
    arrays = {own.path: np.full(own.shape, i, np.float32) for i, own in enumerate(wanted)}
    params = unflatten_dict(arrays)
    state = {"params": params, "optimizer": [{"mu": params}], "step": np.int32(7)}
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        manager.save(
            7,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({"format": 2, "step": 7})
            ),
        )
    found = all_tensors(export(tmp_path / "c" / "7", QWEN3, tmp_path / "out"))
    assert {name: tensor.flat[0] for name, tensor in found.items()} == {
        own.hf_names[0]: i for i, own in enumerate(wanted)
    }
