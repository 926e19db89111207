"""A small decoder on meshes, and the same parameters and batch on one device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from draws import draw

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
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
from jaxpipe.core.schedule import Costs, recompute_ahead
from jaxpipe.core.schedule.lockstep import PLAIN
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.engram.config import EngramConfig
from jaxpipe.model.families.gemma3.config import Gemma3Config
from jaxpipe.model.families.glm4 import Glm4Config
from jaxpipe.model.families.glm4_moe import Glm4MoeConfig
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt_oss.config import GptOssConfig
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.families.minimax_m2 import MiniMaxM2Config
from jaxpipe.model.families.nemotron_h.config import NemotronHConfig
from jaxpipe.model.families.olmo2 import Olmo2Config
from jaxpipe.model.families.olmo3 import Olmo3Config
from jaxpipe.model.families.qwen3_next.config import Qwen3NextConfig
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.neighbours import neighbour_rows
from jaxpipe.model.options import Loss, Ops, Sharing
from jaxpipe.schedules import build

SIZES = {"n_layers": 4, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 40}
# Of the kinds local, local, global, local, so two stages of two layers differ.
ALTERNATING = {"n_kv_heads": 2, "sliding_window": 3, "global_every": 3}
MIXTURE = {"n_experts": 4, "experts_per_token": 2}
GPT_OSS = SIZES | ALTERNATING | MIXTURE | {"rope_original_positions": 4}
# Chunks end within a row; of four layers two are sparse, and one has no positions.
LLAMA4 = SIZES | {
    "n_kv_heads": 2, "n_experts": 4, "moe_every": 2, "nope_every": 3, "attention_chunk": 3,
    "temperature_floor": 2, "rope_theta": 100.0,
}  # fmt: skip
# Of the kinds linear, attention, linear, attention; chunks end within a row and within slices.
HYBRID = SIZES | MIXTURE | {
    "n_kv_heads": 2, "head_dim": 8, "d_expert": 12, "attention_every": 2, "delta_key_heads": 4,
    "delta_value_heads": 8, "delta_key_dim": 6, "delta_value_dim": 5, "delta_taps": 3,
    "delta_chunk": 2,
}  # fmt: skip
# Of Mamba-2, whose chunks end within a row and within slices.
MAMBA = {
    "n_kv_heads": 2, "head_dim": 8, "mamba_heads": 8, "mamba_head_dim": 5, "mamba_groups": 4,
    "mamba_state": 6, "mamba_taps": 3, "mamba_chunk": 3,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_mscale": 1.0,
    "rope_mscale_all_dim": 1.0, "rope_original_positions": 16, "rope_theta": 100.0,
    "rope_beta_fast": 2.0, "rope_beta_slow": 0.5,
}  # fmt: skip
# Latent attention in the second and the last layer, and an MLP in the first.
KIMI = SIZES | MIXTURE | {
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "d_expert": 12, "router_bias": False, "attention_every": 2, "delta_heads": 4,
    "delta_head_dim": 6, "delta_taps": 3, "delta_chunk": 2,
}  # fmt: skip
# The second and third of four layers look up n-grams, many of which share a row.
NGRAMS = {
    "n_kv_heads": 2, "ngram_layers": (1, 2), "ngram_heads": 4, "ngram_rows": 13, "ngram_width": 3,
}  # fmt: skip
NEMOTRON = SIZES | MAMBA | MIXTURE | {"d_expert": 12, "shared_experts": 1}
INDEXED = LATENT | {"index_topk": 3, "index_n_heads": 8, "index_head_dim": 6}
MODELS = {
    "grouped": LlamaConfig(**SIZES, n_kv_heads=2),
    "biased": LlamaConfig(**SIZES, n_kv_heads=2, qkv_bias=True),
    "normed": LlamaConfig(**SIZES, n_kv_heads=4, head_dim=16, qk_norm=True),
    "tied": LlamaConfig(**SIZES, n_kv_heads=2, tie_embeddings=True),
    "one_kv": LlamaConfig(**SIZES, n_kv_heads=1, qk_norm=True, tie_embeddings=True),
    "deep": LlamaConfig(**SIZES | {"n_layers": 8}, n_kv_heads=1, tie_embeddings=True),
    "windowed": LlamaConfig(**SIZES, n_kv_heads=2, sliding_window=3),
    "odd": LlamaConfig(**SIZES | {"d_model": 64, "d_ff": 80}, n_kv_heads=2),  # 3 divides nothing
    "gpt2": GPT2Config(**SIZES, max_seq_len=11),
    "gemma3": Gemma3Config(**SIZES, **ALTERNATING),
    "packed_gemma3": Gemma3Config(**SIZES, **ALTERNATING),
    "gpt_oss": GptOssConfig(**GPT_OSS),
    "packed_gpt_oss": GptOssConfig(**GPT_OSS),
    "fused_gpt_oss": GptOssConfig(**GPT_OSS, attention="cudnn"),
    "llama4": Llama4Config(**LLAMA4),
    "packed_llama4": Llama4Config(**LLAMA4),
    "olmo2": Olmo2Config(**SIZES, n_kv_heads=2),
    "packed_olmo3": Olmo3Config(**SIZES, **ALTERNATING),
    # An MLP, two sparse layers, and predictions of one further token with a sparse block.
    "packed_glm4_moe": Glm4MoeConfig(
        **SIZES | {"n_layers": 3},
        **MIXTURE,
        n_kv_heads=2,
        d_expert=12,
        router_bias=False,
        mtp_depth=1,
        mtp_weight=0.3,
    ),
    "minimax_m2": MiniMaxM2Config(**SIZES, n_kv_heads=2, **MIXTURE, router_bias=False),
    "qwen3_next": Qwen3NextConfig(**HYBRID),
    "packed_qwen3_next": Qwen3NextConfig(**HYBRID),
    "packed_qwen3_next_deep": Qwen3NextConfig(**HYBRID | {"n_layers": 8}),
    "kimi_linear": KimiLinearConfig(**KIMI),
    "packed_kimi_linear": KimiLinearConfig(**KIMI),
    "packed_kimi_linear_deep": KimiLinearConfig(**KIMI | {"n_layers": 8}),
    # Stages of three layers of a kind in a row, and one of another.
    "packed_qwen3_next_runs": Qwen3NextConfig(**HYBRID | {"n_layers": 8, "attention_every": 4}),
    "packed_kimi_linear_runs": KimiLinearConfig(**KIMI | {"n_layers": 8, "attention_every": 4}),
    "nemotron_h": NemotronHConfig(**SIZES, **MAMBA, layer_pattern="M-M*"),
    "engram": EngramConfig(**SIZES, **NGRAMS),
    "packed_engram": EngramConfig(**SIZES, **NGRAMS, **MIXTURE),
    "packed_engram_deep": EngramConfig(**SIZES | {"n_layers": 8}, **NGRAMS, **MIXTURE),
    "packed_nemotron_h": NemotronHConfig(**NEMOTRON, layer_pattern="MEM*"),
    "packed_nemotron_h_runs": NemotronHConfig(**NEMOTRON | {"n_layers": 8}, layer_pattern="MMEE"),
    "packed_nemotron_h_deep": NemotronHConfig(**NEMOTRON | {"n_layers": 8}, layer_pattern="MEM*"),
    "glm4": Glm4Config(**SIZES, n_kv_heads=1, qkv_bias=True),
    "dropping": LlamaConfig(**SIZES, n_kv_heads=2, dropout=0.3, attention_dropout=0.2),
    "gpt2_dropping": GPT2Config(**SIZES, max_seq_len=11, dropout=0.2, attention_dropout=0.3),
    "packed": LlamaConfig(**SIZES, n_kv_heads=2),
    "packed_deep": LlamaConfig(**SIZES | {"n_layers": 8}, n_kv_heads=2),
    "packed_windowed": LlamaConfig(**SIZES, n_kv_heads=2, sliding_window=3),
    "fused": LlamaConfig(**SIZES, n_kv_heads=2, attention="cudnn"),
    "packed_fused": LlamaConfig(**SIZES, n_kv_heads=2, attention="cudnn"),
    "packed_gpt2": GPT2Config(**SIZES, max_seq_len=11),
    "latent": DeepseekConfig(family="deepseek", **SIZES, **LATENT),
    "latent_fused": DeepseekConfig(family="deepseek", **SIZES, **LATENT, attention="cudnn"),
    "packed_latent": DeepseekConfig(family="deepseek", **SIZES, **LATENT | {"q_lora_rank": 0}),
    "indexed": DeepseekConfig(family="deepseek", **SIZES, **INDEXED, index_loss=0.5),
    "warming": DeepseekConfig(family="deepseek", **SIZES, **INDEXED, index_warmup=True),
    "packed_indexed": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **INDEXED, **MIXTURE, mtp_depth=1
    ),
    "ahead": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **LATENT, mtp_depth=1, mtp_weight=0.3
    ),
    "deeper": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 2}, **LATENT, mtp_depth=2, mtp_weight=0.3
    ),
    "packed_ahead": DeepseekConfig(
        family="deepseek",
        **SIZES | {"n_layers": 3, "vocab_size": 41},
        **LATENT,
        mtp_depth=2,
        tie_embeddings=True,
    ),
    # Latent attention and experts; the last of 4 or 8 pipeline layers predicts further tokens.
    "packed_mixture_ahead": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 3}, **LATENT, **MIXTURE, mtp_depth=1
    ),
    "packed_mixture_ahead_deep": DeepseekConfig(
        family="deepseek", **SIZES | {"n_layers": 7}, **LATENT, **MIXTURE, mtp_depth=1
    ),
    "packed_gpt_oss_deep": GptOssConfig(**GPT_OSS | {"n_layers": 8}),
    "packed_latent_fused": DeepseekConfig(
        family="deepseek", **SIZES, **LATENT, attention="cudnn", tie_embeddings=True
    ),
    # Layers of four kinds: all ways of attention, and the first with a table of experts.
    "entries": DeepseekV4Config(
        **SIZES,
        **MIXTURE,
        head_dim=8,
        qk_rope_head_dim=4,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=10,
        sliding_window=3,
        attention_first=("window",),
        csa_rate=2,
        hca_rate=4,
        index_n_heads=8,
        index_head_dim=6,
        index_topk=2,
        hc_mult=3,
        num_hash_layers=1,
        rope_theta=100.0,
        compress_rope_theta=150.0,
        rope_factor=4.0,
        rope_original_positions=16,
        router_bias=False,
    ),
    "uneven": LlamaConfig(**SIZES | {"vocab_size": 41}, n_kv_heads=2),  # 2 and 4 do not divide it
    "uneven_tied": LlamaConfig(**SIZES | {"vocab_size": 33}, n_kv_heads=4, tie_embeddings=True),
    "uneven_gpt2": GPT2Config(**SIZES | {"vocab_size": 37}, max_seq_len=11),
}
MICROBATCHES, EXAMPLES, LENGTH = 8, 4, 8
# Lengths of documents in a row of LENGTH; the rest is padding.
ROWS = ((3, 5), (8,), (1, 2, 1, 2), (2, 6), (), (4, 1, 3), (5, 2), (1, 1, 6), (7,))


@cache
def problem(model, dtype, examples=EXAMPLES):
    config, key = MODELS[model], jax.random.key(0)
    decoder = FAMILIES[config.family].build(config, ops=packing_of(model))

    shared = draw(partial(decoder.init_embed_head, key), dtype=dtype)
    layers = [
        draw(partial(decoder.init_layer, key, i, kind), seed=i, dtype=dtype)
        for i, kind in enumerate(config.layer_kinds)
    ]
    rng = np.random.default_rng(1)
    shape = MICROBATCHES, examples, LENGTH + 1
    tokens = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    targets = np.where(targets % 7 == 3, IGNORE, targets)
    targets[1] = IGNORE
    batch = {"inputs": inputs, "targets": targets}
    if "samples" in decoder.functions.batch_keys:
        numbers = 5 + np.arange(MICROBATCHES * examples, dtype=np.int32)
        numbers = numbers.reshape(MICROBATCHES, examples, 1)
        batch["samples"] = np.broadcast_to(numbers, inputs.shape)
    if model.startswith("packed"):
        batch = packed(batch)
    return decoder, shared, layers, with_neighbours(config, batch)


def with_neighbours(config, batch):
    """Add the rows of a model that predicts further tokens, or reads earlier ones."""
    batch = jax.device_get(batch)
    return batch | neighbour_rows(batch, config)


def packing_of(model):
    """Return the operations of a model, which may have packed rows."""
    return Ops(documents=max(map(len, ROWS)) if model.startswith("packed") else 0)


def rows_of(batch):
    """Return document lengths in each row of a batch, `[M][B]`; no two microbatches are alike."""
    m, b, _ = batch["inputs"].shape
    return [[ROWS[(i + 3 * j) % len(ROWS)] for j in range(b)] for i in range(m)]


def packed(batch):
    """Return the same tokens as documents; last tokens of documents and padding have no target."""
    segments = np.full(batch["inputs"].shape, -1, np.int32)
    positions, targets = np.zeros_like(segments), np.array(batch["targets"])
    for i, rows in enumerate(rows_of(batch)):
        for j, lengths in enumerate(rows):
            ends = np.cumsum(lengths, dtype=int)
            for number, (length, end) in enumerate(zip(lengths, ends)):
                segments[i, j, end - length : end] = number
                positions[i, j, end - length : end] = np.arange(length)
            targets[i, j, [*(ends - 1), *range(sum(lengths), LENGTH)]] = IGNORE
    documents = {"segments": jnp.array(segments), "positions": jnp.array(positions)}
    return batch | documents | {"targets": jnp.array(targets)}


def alone(batch):
    """Return every document of a packed batch as an example whose other tokens do not count.

    Every row gives as many examples as the fullest row. A causal model ignores later tokens.
    """
    m, b, length = batch["inputs"].shape
    most = max(map(len, ROWS))
    own = {"inputs": np.zeros((m, b, most, length), int)}
    own["targets"] = np.full((m, b, most, length), IGNORE)
    own[REAL] = np.zeros((m, b, most, length), int)
    for i, j, number in np.ndindex(m, b, most):
        of_document = np.asarray(batch["segments"][i, j]) == number
        for name, leaf in own.items():
            of_row = np.asarray(batch[name][i, j]) if name in batch else np.ones(length, int)
            leaf[i, j, number, : of_document.sum()] = of_row[of_document]
    return {name: jnp.array(leaf.reshape(m, b * most, length)) for name, leaf in own.items()}


@cache
def wanted(model, dtype, examples=EXAMPLES, z_loss=0.0):
    decoder, shared, layers, batch = problem(model, dtype, examples)
    if model.startswith("packed"):  # the documents one by one, by a model without packing
        config = msgspec.structs.replace(decoder.config, attention="xla")
        decoder = replace(decoder, config=config).with_options(ops={"documents": 0})
        batch = with_neighbours(config, alone(batch))
    functions = decoder.with_options(loss={"z_loss": z_loss}).functions
    step = losses_and_gradients_ref(functions, shared, layers, batch, 1, functions.variables)
    return jax.device_get(step)


def pipeline_of(
    model, schedule, pp, dp, tp, *, cp=1, heads=0, slices=1, sequence=False, loss_chunks=1,
    z_loss=0.0, replicate=1, ep=1, over_tp=False, dtype=jnp.float32, examples=EXAMPLES,
    lockstep=PLAIN, **execution,
):  # fmt: skip
    """Return the pipeline on a mesh, its parameters as they are stored, and the batch.

    `over_tp`: the devices along tp of the `ep` replicas have different experts. `remat="ahead"` is
    full rematerialisation by actions of its own (R).
    """
    _, shared, layers, batch = problem(model, dtype, examples)
    built = build(schedule, pp=pp, microbatches=MICROBATCHES, slices=slices)
    if execution.get("remat") == "ahead":
        built, lockstep = recompute_ahead(built, Costs(R=1.0), replace(lockstep, pairs=False))
        execution["remat"] = "full"
    counts, kinds = (len(layers) // built.stages,) * built.stages, MODELS[model].layer_kinds
    layout = StageLayout(counts, built.placement, kinds, execution.get("unroll_layers"))
    devices = TensorParallel(tp, sequence) if tp > 1 else ONE_DEVICE
    factors = ReplicaFactors(rp=replicate, ep=ep)
    mesh = make_mesh(pp, dp, tp, devices=jax.devices()[: pp * dp * tp], factors=factors)
    of_ends = VocabularyParallel.of(devices, pp) if lockstep.vocab_parallel else None
    shards = ContextParallel(cp, heads) if cp > 1 else FULL_SEQUENCE
    sharers = ep * tp if over_tp else ep
    config, parts = MODELS[model], 2 if execution.get("overlap_halves") == "sequence" else 1
    decoder = FAMILIES[config.family].build(
        config,
        sharing=Sharing(
            devices, of_ends, shards, slices * parts,
            ExpertParallel(sharers, over_tp=over_tp) if sharers > 1 else ALL_EXPERTS,
        ),
        ops=packing_of(model),
        loss=Loss(loss_chunks, z_loss),
    )  # fmt: skip
    batch = shard_batch(batch, slices=slices, cp=cp, dp=dp, heads=heads)
    execution = Execution(lockstep, **execution)
    pipeline = Pipeline(decoder.functions, built, mesh, layout.layers_per_stage, execution)
    params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
    return pipeline, layout, params, batch


def run(model, *args, dtype=jnp.float32, examples=EXAMPLES, z_loss=0.0, **how):
    """Return `(got, want)` of a step on a mesh and on one device."""
    pipeline, layout, params, batch = pipeline_of(
        model, *args, dtype=dtype, examples=examples, z_loss=z_loss, **how
    )
    variables = problem(model, dtype, examples)[0].functions.variables
    of_slices, got = jax.jit(pipeline.losses_and_gradients)(params, batch, variables)
    losses, gradients = wanted(model, dtype, examples, z_loss)
    gradients = gradients | {"layers": layout.stack(gradients["layers"])}
    of_microbatches = of_slices.reshape(MICROBATCHES, -1, *losses.shape[1:]).sum(1)
    return (of_microbatches, got), (
        losses,
        pipeline.sharding.pad(gradients),
    )


def without_key_biases(made):
    """Remove gradients of key biases, which are only rounding: a softmax is invariant to them."""
    losses, gradients = made
    layers = []
    for layer in gradients["layers"]:
        attn = dict(layer["attn"])
        assert jnp.abs(attn.pop("bk")).max() < 1e-15 * jnp.linalg.norm(attn["bv"])
        layers.append({**layer, "attn": attn})
    return losses, {**gradients, "layers": tuple(layers)}
