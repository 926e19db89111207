"""Small mixtures of experts on whole meshes, and what the one-hot twin makes of the same."""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama.decoder import Decoder
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.moe.reference import OneHot
from jaxpipe.parallel import (
    ContextParallel,
    ExpertParallel,
    Factors,
    StageLayout,
    TensorParallel,
    deal_batch,
    make_mesh,
)
from jaxpipe.partition.devices import ONE_DEVICE
from jaxpipe.partition.experts import ALL_EXPERTS
from jaxpipe.partition.sequence import WHOLE_SEQUENCE
from jaxpipe.pipeline import Execution, Pipeline, step_ref
from jaxpipe.schedule import build

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
    "one": LlamaConfig(
        **SIZES | {"experts_per_token": 1}, router_bias_rate=0.01, norm_topk_prob=False,
    ),
}  # fmt: skip
MICROBATCHES, EXAMPLES, LENGTH = 4, 4, 8


def routes_of(config):
    """Different experts for every token and layer, whatever the router says."""
    shape = (MICROBATCHES, EXAMPLES, LENGTH, len(config.sparse_layers))
    first = jax.random.randint(jax.random.key(3), shape, 0, config.n_experts)
    more = jnp.arange(config.experts_per_token).reshape(1, 1, 1, 1, -1)
    return (first[..., None] + more) % config.n_experts


@cache
@jax.enable_x64(True)
def problem(model, crowded=False, routed=False):
    """Parameters of which the router has clear favourites, batch and variables, in float64.

    `crowded`: a bias sends every token to the first experts. `routed`: the batch says where.
    """
    decoder, key = Decoder(MODELS[model]), jax.random.key(0)

    def strong(path, leaf):
        factor = 30 if path[-1].key == "gate" else 5 if leaf.ndim == 3 else 1
        return factor * leaf.astype(jnp.float64)

    cast = lambda tree: jax.tree.map_with_path(strong, tree)  # noqa: E731
    kinds = decoder.config.layer_kinds
    layers = [cast(decoder.init_layer(key, i, kind)) for i, kind in enumerate(kinds)]
    shape = (MICROBATCHES, EXAMPLES, LENGTH + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, decoder.config.vocab_size)
    targets = jnp.where(tokens[..., 1:] % 7 == 3, IGNORE, tokens[..., 1:])
    batch = {"inputs": tokens[..., :-1], "targets": targets}
    if routed:
        batch["routes"] = routes_of(decoder.config)
    variables = decoder.functions.variables
    if variables:
        bias = 0.2 * jax.random.normal(jax.random.key(2), variables["router_bias"].shape)
        if crowded:
            first = jnp.arange(bias.shape[1]) < decoder.config.experts_per_token
            bias = jnp.broadcast_to(100.0 * first[None], bias.shape)
        variables = {"router_bias": bias}
    return decoder, cast(decoder.init_ends(key)), layers, batch, variables


@cache
@jax.enable_x64(True)
def wanted(model, crowded=False, routed=False, slices=1):
    """What one device makes of it by the twin."""
    decoder, shared, layers, batch, variables = problem(model, crowded, routed)
    batch = deal_batch(batch, slices=slices, cp=1, dp=1)
    one_hot = lambda config, replicas, product: OneHot(config)  # noqa: E731
    with patch("jaxpipe.model.moe.layer.dispatch_of", one_hot):
        return step_ref(
            replace(decoder, slices=slices).functions,
            shared,
            layers,
            batch,
            slices,
            variables=variables,
        )


@jax.enable_x64(True)
def run(
    model, name, pp, dp=1, tp=1, ep=1, *, sequence=False, cp=1, method="gather", room=0.0,
    crowded=False, routed=False, slices=1, product=lax.ragged_dot, **execution,
):  # fmt: skip
    """`(got, want)` of a step on a mesh and of the twin, gradients in stage form."""
    _, shared, layers, batch, variables = problem(model, crowded, routed)
    schedule = build(name, pp=pp, microbatches=MICROBATCHES, slices=slices)
    counts = (len(layers) // schedule.stages,) * schedule.stages
    config = MODELS[model]
    layout = StageLayout(counts, schedule.placement, config.layer_kinds)
    mesh = make_mesh(pp, dp, tp, jax.devices()[: pp * dp * tp], factors=Factors(ep=ep))
    decoder = Decoder(
        config,
        TensorParallel(tp, sequence) if tp > 1 else ONE_DEVICE,
        sequence=ContextParallel(cp, method) if cp > 1 else WHOLE_SEQUENCE,
        slices=slices,
        replicas=ExpertParallel(ep, room) if ep > 1 else ALL_EXPERTS,
        product=product,
    )
    pipeline = Pipeline(decoder.functions, schedule, mesh, counts, Execution(**execution))
    params = pipeline.sharding.padded({"shared": shared, "layers": layout.stack(layers)})
    batch = deal_batch(batch, slices=slices, cp=cp, dp=dp, method=method)
    got = jax.jit(pipeline.step)(params, batch, variables)
    want = wanted(model, crowded, routed, slices)
    staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
    return got, want._replace(gradients=pipeline.sharding.padded(staged))
