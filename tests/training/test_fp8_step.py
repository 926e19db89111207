"""A step in 8-bit floats is the same on every mesh; a run can resume with fp8, or without."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from commands import SMALL
from compare import assert_same
from draws import draw
from routed import restored, run

from jaxpipe import config as configs
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.mesh import ExpertParallel, ReplicaFactors, TensorParallel, make_mesh
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek.decoder import DeepseekDecoder
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.deepseek_v4.decoder import DeepseekV4Decoder
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt2.decoder import GPT2
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.kimi_linear.decoder import KimiLinearDecoder
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.families.nemotron_h.config import NemotronHConfig
from jaxpipe.model.families.nemotron_h.decoder import NemotronHDecoder
from jaxpipe.model.families.qwen3_5 import Qwen35Config
from jaxpipe.model.families.qwen3_next.decoder import Qwen3NextDecoder
from jaxpipe.model.kernels.grouped_fp8 import GroupedFp8
from jaxpipe.model.layers.fp8 import Fp8
from jaxpipe.model.layers.lora import Adapters, LoraDecoder
from jaxpipe.model.neighbours import rows_ahead
from jaxpipe.model.options import Ops, Sharing
from jaxpipe.schedules import build
from jaxpipe.training.trainer import Trainer

LAYERS, MICROBATCHES, LENGTH = 4, 4, 16
SIZES = {"n_layers": LAYERS, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 48}
LLAMA = LlamaDecoder, LlamaConfig(**SIZES, n_kv_heads=2, head_dim=16, qk_norm=True)
MIXTURE = LlamaDecoder, LlamaConfig(
    **SIZES, n_kv_heads=2, head_dim=16, n_experts=4, experts_per_token=2, d_expert=16,
    shared_experts=1, first_dense_layers=1, router_bias_rate=0.001,
)  # fmt: skip
# Experts without a capacity whose sizes allow products in 8 bits, on two devices each too.
GROUPED = LlamaDecoder, msgspec.structs.replace(MIXTURE[1], d_model=128, d_expert=256)
SLOTS = LlamaDecoder, msgspec.structs.replace(MIXTURE[1], capacity_factor=1.25)
# Latent attention and experts; the last of the layers predicts a further token.
LATENT = DeepseekDecoder, DeepseekConfig(
    family="deepseek", **SIZES | {"n_layers": LAYERS - 1}, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_experts=4, experts_per_token=2,
    d_expert=16, shared_experts=1, first_dense_layers=1, capacity_factor=1.25, mtp_depth=1,
)  # fmt: skip
# Layers with attention and with gated delta networks, in turn.
HYBRID = Qwen3NextDecoder, Qwen35Config(
    **SIZES, n_kv_heads=2, head_dim=16, attention_every=2, delta_key_heads=2, delta_value_heads=4,
    delta_key_dim=16, delta_value_dim=16, delta_chunk=4,
)  # fmt: skip
KIMI = KimiLinearDecoder, KimiLinearConfig(
    **SIZES, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_experts=4,
    experts_per_token=2, d_expert=16, capacity_factor=1.25, attention_every=2, delta_heads=4,
    delta_head_dim=8, delta_chunk=4, router_bias=False,
)  # fmt: skip
NEMOTRON = NemotronHDecoder, NemotronHConfig(
    **SIZES, n_kv_heads=2, head_dim=16, layer_pattern="M-M*", mamba_heads=4, mamba_head_dim=8,
    mamba_groups=2, mamba_state=16, mamba_chunk=4,
)  # fmt: skip
# All ways of attention, and the first layer with a table of experts.
ENTRIES = DeepseekV4Decoder, DeepseekV4Config(
    **SIZES, head_dim=16, qk_rope_head_dim=8, q_lora_rank=16, o_groups=2, o_lora_rank=16,
    n_experts=4, experts_per_token=2, d_expert=16, capacity_factor=1.25, sliding_window=5,
    attention_first=("window",), csa_rate=2, hca_rate=4, index_n_heads=8, index_head_dim=8,
    index_topk=3, num_hash_layers=1, rope_original_positions=16, router_bias=False,
)  # fmt: skip
GPT = GPT2, GPT2Config(**SIZES, max_seq_len=16)


def adapted(config, sharing, ops):
    """Return a decoder with adapters beside all of its products."""
    return LoraDecoder(LlamaDecoder(config, sharing, ops), Adapters(3, 6.0))


MODELS = {
    "llama": LLAMA, "grouped": GROUPED, "slots": SLOTS, "latent": LATENT,
    "hybrid": HYBRID, "kimi": KIMI, "nemotron": NEMOTRON, "entries": ENTRIES, "gpt2": GPT,
    "adapters": (adapted, LLAMA[1]),
    "slots with adapters": (adapted, SLOTS[1]),
    "grouped with adapters": (adapted, GROUPED[1]),
}  # fmt: skip


def batch(microbatches, sequences, model=LLAMA):
    _, config = model
    tokens = jax.random.randint(jax.random.key(1), (8, 2, LENGTH + 1), 0, 48)
    tokens = tokens.reshape(microbatches, sequences, LENGTH + 1)
    rows = {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}
    return rows | rows_ahead(jax.tree.map(np.asarray, rows), config.tokens_ahead)


@cache
def wanted(model, history, microbatches):
    """Return the reference's parameters, state and step, on one device without a schedule."""
    make, config = MODELS[model]
    one, key = make(config, Sharing(), Ops(Fp8(history, GroupedFp8()))), jax.random.key(0)

    shared = draw(partial(one.init_embed_head, key))
    layers = [
        draw(partial(one.init_layer, key, i, kind), seed=i)
        for i, kind in enumerate(config.layer_kinds)
    ]
    variables = one.functions.variables
    if history:  # scales that differ by layer, product and operand, some of them too small
        drawn = np.random.default_rng(3).integers(-6, 1, variables["fp8_scale"].shape)
        variables = variables | {"fp8_scale": variables["fp8_scale"] * 2.0**drawn}
    variables = jax.tree.map(jnp.asarray, variables)
    given = batch(microbatches, 16 // microbatches, MODELS[model])
    want = step_ref(one.functions, shared, layers, given, variables=variables)
    return jax.device_get((shared, layers, variables, want))


@pytest.mark.extended
@pytest.mark.slow(unless=["llama-0-zb_h1-*", "adapters-4-*", "grouped-4-zb_h1-*", "hybrid-0-*"])
@pytest.mark.parametrize(
    ("model", "history", "name", "mesh", "sequence", "execution"),
    [
        ("llama", 4, "zb_h1", (2, 2, 1), False, {"zero_stage": 2}),
        ("llama", 4, "zbv", (2, 2, 2), True, {"remat": "selective"}),
        ("llama", 0, "1f1b", (2, 1, 2), False, {"remat": "full"}),
        ("llama", 0, "zb_h1", (2, 2, 1), False, {"zero_stage": 3, "reshard_after_forward": True}),
        ("gpt2", 4, "dualpipe", (2, 2, 1), False, {}),
        ("grouped", 4, "interleaved_1f1b", (2, 1, 2), True, {}),
        ("grouped", 4, "zb_h1", (2, 2, 2, 2), True, {"remat": "selective", "zero_stage": 2}),
        ("grouped", 0, "1f1b", (2, 1, 2), False, {}),
        ("llama", 4, "1f1b", (2, 2, 1), False, {"overlap_sums": True, "poison_bubbles": True}),
        ("slots", 4, "zb_h1", (2, 2, 1, 2), False, {"remat": "full"}),
        ("slots", 4, "1f1b", (2, 2, 2, 2), True, {"zero_stage": 2, "poison_bubbles": True}),
        ("slots", 0, "1f1b", (2, 1, 2), False, {}),
        ("adapters", 4, "zb_h1", (2, 2, 2), False, {"zero_stage": 2}),
        ("adapters", 0, "zbv", (2, 2, 1), False, {"zero_stage": 3, "reshard_after_forward": True}),
        ("adapters", 0, "dualpipe", (2, 1, 2), True, {"remat": "full"}),
        ("slots with adapters", 4, "zb_h1", (2, 2, 2, 2), True, {"poison_bubbles": True}),
        ("slots with adapters", 0, "1f1b", (2, 1, 2), False, {}),
        ("grouped with adapters", 4, "1f1b", (2, 2, 1, 2), False, {"remat": "full"}),
        ("latent", 4, "zb_h1", (2, 2, 1, 2), False, {"zero_stage": 2}),
        ("latent", 4, "dualpipe", (2, 2, 1, 2), False, {"remat": "full"}),
        ("hybrid", 4, "zb_h1", (2, 2, 2), True, {"remat": "selective", "zero_stage": 2}),
        ("hybrid", 0, "1f1b", (2, 1, 2), False, {"remat": "full"}),
        ("kimi", 4, "zb_h1", (2, 2, 1, 2), False, {"remat": "full", "zero_stage": 2}),
        ("nemotron", 4, "zb_h1", (2, 1, 2), True, {"remat": "selective"}),
        ("entries", 4, "zb_h1", (2, 2, 1, 2), False, {"remat": "full", "zero_stage": 2}),
    ],
)
def test_a_step_is_that_of_one_device(model, history, name, mesh, sequence, execution):
    pp, dp, tp, ep = (*mesh, 1)[:4]
    with jax.enable_x64(True):
        # With current scales each replica's share of a microbatch has its own scales.
        reference = MICROBATCHES * dp if not history else MICROBATCHES
        shared, layers, variables, want = wanted(model, history, reference)
        make, config = MODELS[model]
        more = {"devices": TensorParallel(tp, sequence)} if tp > 1 else {}
        more |= {"replicas": ExpertParallel(ep)} if ep > 1 else {}
        functions = make(config, Sharing(**more), Ops(Fp8(history, GroupedFp8()))).functions
        schedule = build(name, pp=pp, microbatches=MICROBATCHES)
        devices = jax.devices()[: pp * dp * tp]
        mesh = make_mesh(pp, dp, tp, devices=devices, factors=ReplicaFactors(ep=ep))
        counts = (LAYERS // schedule.stages,) * schedule.stages
        pipeline = Pipeline(functions, schedule, mesh, counts, Execution(**execution))
        layout = pipeline.layout(LAYERS // pp)
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        given = batch(MICROBATCHES, 4, MODELS[model])
        got = jax.jit(pipeline.step)(params, given, variables)
        gradients = {**got.gradients, "layers": layout.unstack(got.gradients["layers"])}
        for layer in (*gradients["layers"], *want.gradients["layers"]):
            layer.get("attn", {}).pop("bk", None)  # is zero: softmax is invariant to it
        assert_same((got.losses.sum(), gradients), (want.losses.sum(), want.gradients))
        if history:
            np.testing.assert_allclose(
                got.aux.maxima["fp8_scale"], want.aux.maxima["fp8_scale"], 1e-6
            )
            assert (want.aux.maxima["fp8_scale"] > 0).any(axis=(0, 1)).all()


@pytest.mark.slow
def test_slices_are_seen_too():
    """A sequence in two slices gives the step of the full one, up to the statistics for scales."""
    with jax.enable_x64(True):
        shared, layers, variables, want = wanted("llama", 4, MICROBATCHES)
        functions = LlamaDecoder(LLAMA[1], Sharing(slices=2), Ops(Fp8(4))).functions
        schedule = build("1f1b", pp=2, microbatches=MICROBATCHES, slices=2)
        mesh = make_mesh(2, 1, devices=jax.devices()[:2])
        pipeline = Pipeline(functions, schedule, mesh, (2, 2), Execution())
        layout = pipeline.layout(2)
        cut = lambda a: a.reshape(4, 4, 2, 8).swapaxes(1, 2).reshape(8, 4, 8)  # noqa: E731
        given = {name: cut(leaf) for name, leaf in batch(MICROBATCHES, 4).items()}
        given["slice"] = jnp.tile(jnp.arange(2)[:, None], (4, 4)).reshape(8, 4)
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        got = jax.jit(pipeline.step)(params, given, variables)
        reference = step_ref(functions, shared, layers, given, 2, variables)
        gradients = {**got.gradients, "layers": layout.unstack(got.gradients["layers"])}
        assert_same((got.losses, gradients), (reference.losses, reference.gradients))
        maxima = got.aux.maxima["fp8_scale"], reference.aux.maxima["fp8_scale"]
        np.testing.assert_allclose(*maxima, 1e-6)
        np.testing.assert_allclose(got.losses.sum(), want.losses.sum(), 1e-12)


def batches(position, microbatches, batch_size, rows=None):
    while True:
        tokens = np.random.default_rng(position).integers(0, 256, (microbatches, batch_size, 33))
        tokens = tokens.astype(np.int32)
        yield {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}
        position += microbatches * batch_size


def trainer_of(*overrides):
    given = ["train.compute_dtype=bfloat16", "train.eval_every=0", "model.d_model=64",
             "train.fp8_history=3", "parallel.pp=2", "parallel.dp=1", "train.microbatch_size=2",
             *overrides]  # fmt: skip
    config = configs.load(SMALL, given)
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


@pytest.mark.slow
def test_a_run_goes_on_in_8_bits_elsewhere_and_back(tmp_path):
    """bfloat16, then fp8 with scales of its own, then bfloat16 again; restored on another mesh."""
    said = []
    assert run(trainer_of("train.steps=1"), tmp_path, data=batches) == 0
    fp8 = trainer_of("train.fp8=delayed", "train.steps=3")
    assert run(fp8, tmp_path, said.append, data=batches) == 0
    assert any(
        "no fp8_history, fp8_scale of this model: started from initial values" in line
        for line in said
    )
    elsewhere = trainer_of(
        "train.fp8=delayed", "parallel.dp=2", "parallel.tp=2", "parallel.zero_stage=2"
    )
    (state, _), (other, _) = restored(fp8, tmp_path), restored(elsewhere, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    variables = state["variables"]
    history = variables["fp8_history"]
    assert history.shape == (4, 7, 3, 3)
    assert (history[..., :2] > 0).all()  # after two steps, for every operand of every product
    assert (history[..., 2] == 0).all()
    power = 2.0 ** (np.floor(np.log2(history.max(-1))) + 1 - np.array([8, 8, 15]))
    np.testing.assert_array_equal(variables["fp8_scale"], power)
    (longer, _) = restored(trainer_of("train.fp8=delayed", "train.fp8_history=5"), tmp_path)
    assert longer["variables"].keys() == {"fp8_scale"}  # a history of another length starts empty
    assert run(trainer_of("train.steps=4"), tmp_path, said.append, data=batches) == 0
