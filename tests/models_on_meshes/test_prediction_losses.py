"""Every auxiliary loss of a model is a mean over its own terms, whatever masks and meshes."""

from functools import cache

import jax
import numpy as np
import pytest
from compare import assert_same
from mixtures import DEEPSEEK, SIZES
from orders import build

from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.mesh import ContextParallel, make_mesh, shard_batch
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.neighbours import rows_ahead

LENGTH, DEPTH = 8, 2
DENSE = {name: size for name, size in SIZES.items() if "expert" not in name}
SIZES_OF = {"dense": DENSE, "experts": SIZES | DEEPSEEK | {"router_z_loss": 0.01}}


@cache
@jax.enable_x64(True)
def model(kind):
    """Return a decoder that predicts two further tokens, and its parameters in float64."""
    sizes = {name: size for name, size in SIZES_OF[kind].items() if name != "n_kv_heads"}
    config = DeepseekConfig(
        family="deepseek", **sizes | {"n_layers": 3}, q_lora_rank=6, kv_lora_rank=8,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, mtp_depth=DEPTH, mtp_weight=0.3,
    )  # fmt: skip
    decoder, key = FAMILIES["deepseek"].build(config), jax.random.key(0)
    layers = [decoder.init_layer(key, i, kind) for i, kind in enumerate(decoder.config.layer_kinds)]
    cast = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
    return decoder, jax.tree.map(cast, (decoder.init_embed_head(key), layers))


def rows_of(kind, seed, microbatches, examples):
    """Return rows of which few tokens are targets; with experts some rows end in padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, (microbatches, examples, LENGTH + 1))
    masked = rng.random(tokens[..., 1:].shape) < rng.choice([0.0, 0.5, 0.9])
    rows = {"inputs": tokens[..., :-1], "targets": np.where(masked, IGNORE, tokens[..., 1:])}
    rows["targets"][:, :, : rng.integers(0, LENGTH)] = IGNORE  # prompts
    if kind == "experts":
        real = np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (microbatches, examples, 1))
        rows |= {"targets": np.where(real, rows["targets"], IGNORE), "real": real.astype(np.int32)}
    return rows | rows_ahead(rows, DEPTH)


MESHES = [  # schedule, pp, dp, cp, microbatches
    ("gpipe", 1, 1, 1, 1), ("1f1b", 2, 2, 1, 2), ("zb_h1", 2, 2, 2, 3), ("zb_h1", 4, 1, 1, 4),
]  # fmt: skip


@pytest.mark.extended
@pytest.mark.slow(only=["*2-2-2*", "*4-1-1*"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(map(str, mesh)))
@pytest.mark.parametrize("kind", SIZES_OF)
def test_aux_loss_is_the_weighted_sum_of_the_logged_means(kind, mesh):
    name, pp, dp, cp, microbatches = mesh
    decoder, (shared, layers) = model(kind)
    with jax.enable_x64(True):
        sharing = ContextParallel(cp) if cp > 1 else FULL_SEQUENCE
        functions = decoder.with_options(sharing={"sequence": sharing}).functions
        pipeline = Pipeline(
            functions, build(name, pp=pp, microbatches=microbatches),
            make_mesh(pp, dp, devices=jax.devices()[: pp * dp]), (4 // pp,) * pp, Execution(),
        )  # fmt: skip
        layout = pipeline.layout(4 // pp)
        params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
        step = jax.jit(pipeline.step)
        for seed in range(3):
            rows = rows_of(kind, seed, microbatches, 2 * dp // cp)
            variables = functions.variables
            got = step(params, shard_batch(rows, slices=1, cp=cp, dp=dp), variables)
            logged = functions.report(got.aux) if functions.report else {}
            total = 0.3 * logged["mtp_loss"] + np.sum(logged.get("router_loss", 0.0))
            np.testing.assert_allclose(got.aux_losses.sum(), total, rtol=1e-12)
            targets = [(rows[f"targets_ahead_{k}"] != IGNORE).sum() for k in range(1, DEPTH + 1)]
            assert got.aux.sums["mtp_targets"].tolist() == targets
            means = np.asarray(got.aux.sums["mtp_loss"]) / np.maximum(targets, 1)
            added = 0.3 / DEPTH * means.sum()
            if kind == "experts":
                added += got.aux.sums["router_loss"].sum() / max(rows["real"].sum(), 1)
            np.testing.assert_allclose(got.aux_losses.sum(), added, rtol=1e-12)
        want = step_ref(decoder.functions, shared, layers, rows, variables=variables)
        staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
        assert_same(got.gradients, pipeline.sharding.pad(staged))
        assert_same(got.aux_losses.sum(), want.aux_losses.sum())
