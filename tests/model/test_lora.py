"""Low-rank adapters: on any mesh the gradients of merged weights on one device, and no others."""

from functools import partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from compare import assert_same, assert_within, relative
from draws import draw
from msgspec import structs

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import (
    ContextParallel,
    ExpertParallel,
    ReplicaFactors,
    StageLayout,
    TensorParallel,
    VocabularyParallel,
    make_mesh,
    shard_batch,
)
from jaxpipe.core.schedule import Lockstep
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.lora import Adapter, Adapters, LoraDecoder, merge_adapter
from jaxpipe.model.options import Sharing
from jaxpipe.schedules import build

SIZES = {"n_layers": 4, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 40}
SPARSE = {
    "n_kv_heads": 2, "n_experts": 4, "d_expert": 24, "experts_per_token": 2, "shared_experts": 1,
    "first_dense_layers": 1,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES, n_kv_heads=2, qk_norm=True),
    "gpt2": GPT2Config(**SIZES, max_seq_len=8),
    "experts": LlamaConfig(**SIZES, **SPARSE),
    "latent": DeepseekConfig(
        **SIZES,
        family="deepseek",
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "capacity": LlamaConfig(**SIZES, **SPARSE, capacity_factor=1.5),
}
INDEXER = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8}
MODELS["indexed"] = structs.replace(MODELS["latent"], **INDEXER)
MODELS |= {name: meshes.MODELS[name] for name in ("kimi_linear", "packed_nemotron_h")}
MICROBATCHES, EXAMPLES, LENGTH = 4, 4, 8
FEW = ("wq", "w_down")


def problem(name, adapters):
    """Return the decoder on one device, its parameters with adapters that are not zero, a batch."""
    config, key = MODELS[name], jax.random.key(0)
    decoder = LoraDecoder(FAMILIES[config.family].build(config), adapters)

    layers = [
        draw(partial(decoder.init_layer, key, i, kind), seed=i)
        for i, kind in enumerate(config.layer_kinds)
    ]
    shared = draw(partial(decoder.init_embed_head, key))
    shape = (MICROBATCHES, EXAMPLES, LENGTH + 1)
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=shape, dtype=np.int32)
    return decoder, shared, layers, {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}


def by_path(tree):
    """Return the leaves of nested dicts by path."""
    return {tuple(k.key for k in path): leaf for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def merged(layer, scale):
    """Return the layer's frozen weights with the adapters added."""
    flat = by_path({name: leaf for name, leaf in layer.items() if name != "lora"})
    own = by_path(layer["lora"])
    for path in {path[:-1] for path in own}:
        adapter = Adapter(own[*path, "a"], own[*path, "b"])
        flat[path] = merge_adapter(flat[path], adapter, scale)
    tree = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def expected(decoder, shared, layers, batch):
    """Return losses, and the adapters' gradients by the chain rule from those of merged weights."""
    scale = decoder.adapters.scale
    every = [merged(layer, scale) for layer in layers]
    losses, gradients = losses_and_gradients_ref(decoder.base.functions, shared, every, batch)
    found = []
    for layer, gradient in zip(layers, gradients["layers"], strict=True):
        own, at_weights, of_layer = by_path(layer["lora"]), by_path(gradient), {}
        for path in {path[:-1] for path in own}:
            a, b = own[*path, "a"], own[*path, "b"]
            at_weight = at_weights[path]
            of_layer[*path, "a"] = scale * at_weight @ b.swapaxes(-1, -2)
            of_layer[*path, "b"] = scale * a.swapaxes(-1, -2) @ at_weight
        found.append(of_layer)
    return losses, found


def on_mesh(
    decoder, shared, layers, batch, schedule, *, dp=1, tp=1, ep=1, cp=1, sequence=False, **how
):
    """Return losses and gradients of a step on a mesh, the latter by layer."""
    devices = TensorParallel(tp, sequence) if tp > 1 else ONE_DEVICE
    sharing = {"devices": devices}
    if ep > 1:
        sharing["replicas"] = ExpertParallel(ep, 0)
    if cp > 1:
        sharing["sequence"] = ContextParallel(cp)
    if how.get("lockstep", Lockstep()).vocab_parallel:
        sharing["embed_head_devices"] = VocabularyParallel.of(devices, schedule.pp)
    config = decoder.base.config
    base = FAMILIES[config.family].build(config, sharing=Sharing(**sharing))
    shared_model = LoraDecoder(base, decoder.adapters)
    count = schedule.pp * dp * tp
    mesh = make_mesh(
        schedule.pp, dp, tp, devices=jax.devices()[:count], factors=ReplicaFactors(ep=ep)
    )
    stages = schedule.placement.stages
    layout = StageLayout((len(layers) // stages,) * stages, schedule.placement, config.layer_kinds)
    functions, counts = shared_model.functions, layout.layers_per_stage
    pipeline = Pipeline(functions, schedule, mesh, counts, Execution(**how))
    params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
    batch = shard_batch(batch, slices=1, cp=cp, dp=dp)
    losses, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
    assert not jax.tree.leaves(gradients["embed_head"])
    return losses, [by_path(layer) for layer in layout.unstack(gradients["layers"])]


CASES = {
    "tp": (
        "llama",
        "zb_h1",
        (),
        {"tp": 2, "dp": 2, "zero_stage": 3, "reshard_after_forward": True},
    ),
    "sequence": (
        "llama",
        "zbv",
        FEW,
        {"tp": 2, "sequence": True, "lockstep": Lockstep(vocab_parallel=True)},
    ),
    "dualpipe": ("gpt2", "dualpipe", (), {"dp": 2, "zero_stage": 1, "remat": "full"}),
    "latent": ("latent", "zb_h1", (), {"tp": 2, "dp": 2, "zero_stage": 1}),
    "cp": ("llama", "1f1b", ("wk", "wo"), {"dp": 2, "cp": 2, "remat": "selective"}),
    "experts": ("experts", "1f1b", (), {"dp": 2, "ep": 2, "tp": 2}),
    "kimi_linear": ("kimi_linear", "zb_h1", (), {"dp": 2, "ep": 2, "tp": 2, "remat": "selective"}),
    "nemotron_h": ("packed_nemotron_h", "1f1b", (), {"dp": 2, "cp": 2, "tp": 2, "remat": "full"}),
    "layers without": ("packed_nemotron_h", "zbv", ("wq", "wz"), {"dp": 2, "zero_stage": 3}),
    "capacity": ("capacity", "zb_h1", ("expert_up", "expert_down", "w_gate"), {"dp": 2, "ep": 2}),
}


@pytest.mark.extended
@pytest.mark.slow(unless=["experts"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_merged_weights(case):
    model, name, targets, how = CASES[case]
    schedule = build(name, pp=2, microbatches=MICROBATCHES)
    with jax.enable_x64(True):
        every = problem(model, Adapters(3, 6.0, targets))
        losses, gradients = on_mesh(*every, schedule, **how)
        want_losses, want = expected(*every)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-12)
        assert all(path[0] == "lora" for found in gradients for path in found)
        trained = [{path[1:]: leaf for path, leaf in found.items()} for found in gradients]
        assert_same(trained, want)


def test_new_adapters_change_nothing_and_only_targets_have_them():
    with jax.enable_x64(True):
        decoder, shared, layers, batch = problem("llama", Adapters(2, 2.0, FEW))
        first = decoder.init_layer(jax.random.key(0), 1)
        assert {path[1:-1] for path in by_path(first) if path[0] == "lora"} == {
            ("attn", "wq"), ("mlp", "w_down"),
        }  # fmt: skip
        assert not first["lora"]["attn"]["wq"]["b"].any()
        a, w = first["lora"]["attn"]["wq"]["a"].ravel(), first["attn"]["wq"].ravel()[: 32 * 2]
        assert 0 < jnp.abs(a).max() <= 32**-0.5
        assert (a.argsort() != w.argsort()).any()  # drawn apart
        plain = [{k: v for k, v in layer.items() if k != "lora"} for layer in layers]
        zeros = [layer | {"lora": jax.tree.map(jnp.zeros_like, layer["lora"])} for layer in layers]
        want, _ = losses_and_gradients_ref(decoder.base.functions, shared, plain, batch)
        got, _ = losses_and_gradients_ref(decoder.functions, shared, zeros, batch)
        np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh():
    schedule = build("zb_h1", pp=2, microbatches=MICROBATCHES)
    with jax.enable_x64(True):
        decoder, shared, layers, batch = problem("llama", Adapters(3, 6.0, dropout=0.4))
        numbers = jnp.arange(MICROBATCHES * EXAMPLES).reshape(MICROBATCHES, EXAMPLES, 1)
        whole = batch | {"samples": jnp.broadcast_to(numbers, batch["inputs"].shape)}
        without, _ = losses_and_gradients_ref(decoder.functions, shared, layers, batch)
        losses, gradients = losses_and_gradients_ref(decoder.functions, shared, layers, whole)
        assert relative(losses, without) > 1e-4
        how = {"tp": 2, "dp": 2, "sequence": True}
        got, found = on_mesh(decoder, shared, layers, whole, schedule, **how)
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        assert_within(relative, 1e-12, found, list(map(by_path, gradients["layers"])))


@pytest.mark.parametrize(
    ("model", "adapters", "how", "sentence"),
    [
        ("llama", Adapters(2, 2.0, ("wz",)), {}, "lora.targets has 'wz', or is left out for all"),
        ("indexed", Adapters(2, 2.0), {}, "lora.targets has 'weights', or is left out for all"),
        ("experts", Adapters(2, 2.0, dropout=0.1), {}, "the inputs of experts have no positions"),
        (
            "llama", Adapters(2, 2.0), {"devices": TensorParallel(4)},
            "parallel.tp=4 must divide model.n_kv_heads",
        ),
        ("latent", Adapters(2, 2.0, dropout=0.1), {"slices": 2}, "2 slices of a sequence have no"),
        (
            "latent", Adapters(2, 2.0, dropout=0.1), {"sequence": ContextParallel(2)},
            "parallel.cp=2 .* leave wkv_b out",
        ),
    ],
)  # fmt: skip
def test_refusals(model, adapters, how, sentence):
    config = MODELS[model]
    base = FAMILIES[config.family].build(config, sharing=Sharing(**how))
    with pytest.raises(ValueError, match=sentence):
        LoraDecoder(base, adapters)
