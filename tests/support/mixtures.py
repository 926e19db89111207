"""Small mixtures of experts on meshes, and the one-hot reference implementation of them."""

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

from jaxpipe.core.contract import Aux
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.core.mesh import (
    REPLICA_AXES,
    ContextParallel,
    ExpertParallel,
    ReplicaFactors,
    TensorParallel,
    make_mesh,
    shard_batch,
)
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.moe.layer import choose_dispatch
from jaxpipe.model.layers.moe.reference import one_hot
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.neighbours import rows_ahead
from jaxpipe.model.options import Ops, Sharing
from jaxpipe.schedules import build

SIZES = {
    "n_layers": 4, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 40,
    "n_experts": 8, "d_expert": 12, "experts_per_token": 2,
}  # fmt: skip
DEEPSEEK = {
    "router_score": "sigmoid", "expert_groups": 4, "groups_per_token": 2, "experts_per_token": 3,
    "router_scale": 2.5, "shared_experts": 1, "first_dense_layers": 1, "router_bias_rate": 0.01,
    "router_aux_loss": 0.1, "tie_embeddings": True,
}  # fmt: skip
MODELS = {
    "qwen": LlamaConfig(**SIZES, router_aux_loss=0.1, router_z_loss=0.01),
    "deepseek": LlamaConfig(**SIZES | DEEPSEEK),
    "switch": LlamaConfig(
        **SIZES | {"experts_per_token": 1}, moe_every=2, capacity_factor=1.25,
        norm_topk_prob=False, router_aux_loss=0.1,
    ),
    "narrow": LlamaConfig(**SIZES, capacity_factor=0.5),
    "roomy": LlamaConfig(**SIZES, capacity_factor=4.0, router_aux_loss=0.1),
    "ahead": DeepseekConfig(
        family="deepseek", **{name: size for name, size in SIZES.items() if name != "n_kv_heads"}
        | {"n_layers": 3} | DEEPSEEK,
        q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        mtp_depth=1, mtp_weight=0.5,
    ),
    "one": LlamaConfig(
        **SIZES | {"experts_per_token": 1}, router_bias_rate=0.01, norm_topk_prob=False,
    ),
}  # fmt: skip
MICROBATCHES, EXAMPLES, LENGTH = 4, 4, 8
HELD = (8, 3, 0, 5, 3, 8, 5)  # tokens of rows that end in padding, repeated over the rows


def routes_of(config):
    """Return different experts for every token and layer, independent of the router."""
    shape = (MICROBATCHES, EXAMPLES, LENGTH, len(config.sparse_layers))
    first = jax.random.randint(jax.random.key(3), shape, 0, config.n_experts)
    more = jnp.arange(config.experts_per_token).reshape(1, 1, 1, 1, -1)
    return (first[..., None] + more) % config.n_experts


@cache
@jax.enable_x64(True)
def problem(model, crowded=False, routed=False):
    """Return parameters whose router has clear favourites, batch and variables, in float64.

    `crowded`: a bias sends every token to the first experts. `routed`: the batch contains routes.
    """
    config, key = MODELS[model], jax.random.key(0)
    decoder = FAMILIES[config.family].build(config)

    def strong(path, leaf):
        factor = 30 if path[-1].key == "gate" else 5 if leaf.ndim == 3 else 1
        return factor * np.asarray(leaf, np.float64)

    cast = lambda tree: jax.tree.map_with_path(strong, tree)  # noqa: E731
    kinds = decoder.config.layer_kinds
    layers = [cast(decoder.init_layer(key, i, kind)) for i, kind in enumerate(kinds)]
    shape = (MICROBATCHES, EXAMPLES, LENGTH + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, decoder.config.vocab_size)
    targets = jnp.where(tokens[..., 1:] % 7 == 3, IGNORE, tokens[..., 1:])
    batch = {"inputs": tokens[..., :-1], "targets": targets}
    batch = jax.device_get(batch)
    batch |= rows_ahead(batch, decoder.config.tokens_ahead)
    if routed:
        batch["routes"] = routes_of(decoder.config)
    variables = decoder.functions.variables
    if variables:
        bias = 0.2 * jax.random.normal(jax.random.key(2), variables["router_bias"].shape)
        if crowded:
            first = jnp.arange(bias.shape[1]) < decoder.config.experts_per_token
            bias = jnp.broadcast_to(100.0 * first[None], bias.shape)
        variables = {"router_bias": bias}
    return decoder, cast(decoder.init_embed_head(key)), layers, batch, variables


@cache
@jax.enable_x64(True)
def wanted(model, crowded=False, routed=False, slices=1):
    """Return the step of the one-hot reference on one device."""
    decoder, shared, layers, batch, variables = problem(model, crowded, routed)
    batch = shard_batch(batch, slices=slices, cp=1, dp=1)
    decoder = decoder.with_options(sharing={"slices": slices}, ops={"dispatch": one_hot})
    return jax.device_get(
        step_ref(decoder.functions, shared, layers, batch, slices, variables=variables)
    )


def held():
    """Return the number of tokens of every row, `[M, B]`."""
    return np.resize(HELD, (MICROBATCHES, EXAMPLES))


def padded(batch, packed):
    """Return rows with real tokens only at the start, as one document if `packed`."""
    real = np.arange(LENGTH) < held()[..., None]
    padding = np.arange(LENGTH) % 3  # any token ids: they must not change the result
    ours = {"inputs": np.where(real, batch["inputs"], padding)}
    ours["targets"] = np.where(real, batch["targets"], IGNORE)
    if not packed:
        return ours | {"real": real.astype(np.int32)}
    positions = np.broadcast_to(np.arange(LENGTH), real.shape)
    return ours | {"segments": np.where(real, 0, -1), "positions": positions}


@cache
@jax.enable_x64(True)
def unpadded(model):
    """Return the step of the one-hot reference on the same rows without padding, as one loss.

    Rows of equal length form a batch. Everything is a sum over tokens: the head's loss is divided
    by the number of targets, the router losses by the number of tokens.
    """
    decoder, shared, layers, batch, variables = problem(model)
    decoder = decoder.with_options(ops={"dispatch": one_hot})
    plain = replace(
        decoder, config=msgspec.structs.replace(decoder.config, router_aux_loss=0, router_z_loss=0)
    )
    heads, routers, terms, tokens = [], [], [], []
    for length in sorted({*HELD} - {0}):
        own = {name: leaf[held() == length][None, :, :length] for name, leaf in batch.items()}
        made, without = (
            step_ref(each.functions, shared, layers, own, variables=variables)
            for each in (decoder, plain)
        )
        terms.append(jnp.sum(own["targets"] != IGNORE))
        tokens.append(own["inputs"].size)
        of_head = without.losses, without.gradients
        of_router = jax.tree.map(jnp.subtract, made.gradients, without.gradients), made.aux_losses
        heads.append(jax.tree.map(lambda leaf: leaf * terms[-1], of_head))
        routers.append((jax.tree.map(lambda leaf: leaf * tokens[-1], of_router), made.aux.sums))
    add = lambda *leaves: sum(leaves)  # noqa: E731
    head = jax.tree.map(lambda *leaves: add(*leaves) / add(*terms), *heads)
    router, sums = jax.tree.map(add, *routers)
    gradients, aux_losses = jax.tree.map(lambda leaf: leaf / add(*tokens), router)
    gradients = jax.tree.map(jnp.add, head[1], gradients)
    counts = jnp.stack(terms).sum(keepdims=True)
    return StepOutput(head[0], gradients, Aux({}, sums), None, counts, aux_losses)


def pipeline_of(
    model, name, pp, dp=1, tp=1, ep=1, *, microbatches=MICROBATCHES, sequence=False, cp=1,
    heads=0, room=0.0, over_tp=False, per_host=1, slices=1, product=lax.ragged_dot, documents=0,
    **execution,
):  # fmt: skip
    """Return the pipeline on a mesh, with equally many layers in each stage.

    `over_tp`: the devices along tp of the `ep` replicas have different experts. `per_host`: devices
    of these that are in one host, for the two-stage all-to-all.
    """
    config = MODELS[model]
    schedule = build(name, pp=pp, microbatches=microbatches, slices=slices)
    counts = (config.pipeline_layers // schedule.stages,) * schedule.stages
    mesh = make_mesh(pp, dp, tp, jax.devices()[: pp * dp * tp], factors=ReplicaFactors(ep=ep))
    sharers, replicas = ep * tp if over_tp else ep, ALL_EXPERTS
    if sharers > 1:
        replicas = ExpertParallel(sharers, room, over_tp, per_host)
    parts = 2 if execution.get("overlap_halves") == "sequence" else 1
    decoder = FAMILIES[config.family].build(
        config,
        sharing=Sharing(
            devices=TensorParallel(tp, sequence or over_tp) if tp > 1 else ONE_DEVICE,
            sequence=ContextParallel(cp, heads) if cp > 1 else FULL_SEQUENCE,
            slices=slices * parts,
            replicas=replicas,
        ),
        ops=Ops(dispatch=partial(choose_dispatch, product=product), documents=documents),
    )
    return Pipeline(decoder.functions, schedule, mesh, counts, Execution(**execution))


@jax.enable_x64(True)
def run(model, *mesh, crowded=False, routed=False, padding="", slices=1, cp=1, heads=0, **how):
    """Return `(got, want)` of a step on a mesh and of the one-hot reference, stage-stacked.

    With `padding` "packed" or "real" rows end in padding, marked by documents or by `real`; the
    rows of the reference have none.
    """
    _, shared, layers, batch, variables = problem(model, crowded, routed)
    documents = padding == "packed"
    pipeline = pipeline_of(
        model, *mesh, slices=slices, cp=cp, heads=heads, documents=documents, **how
    )
    layout = pipeline.layout(len(layers))
    params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
    if padding:
        batch = padded(batch, documents)
    dp = math.prod(pipeline.mesh.shape[axis] for axis in REPLICA_AXES)
    batch = shard_batch(batch, slices=slices, cp=cp, dp=dp, heads=heads)
    got = jax.jit(pipeline.step)(params, batch, variables)
    parts = 2 if how.get("overlap_halves") == "sequence" else 1
    want = unpadded(model) if padding else wanted(model, crowded, routed, slices * parts)
    if parts > 1:  # what the reference has of slices is of both halves
        of_slices = {name: getattr(want, name) for name in ("losses", "counts", "aux_losses")}
        of_both = jax.tree.map(lambda a: a.reshape(-1, parts).sum(1), of_slices)
        want = want._replace(**of_both)
    if padding:
        of_microbatches = got.losses, got.counts, got.aux_losses
        losses, counts, aux = jax.tree.map(lambda a: a.sum(keepdims=True), of_microbatches)
        got = got._replace(losses=losses, counts=counts, aux_losses=aux)
    staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
    return got, want._replace(gradients=pipeline.sharding.pad(staged))
