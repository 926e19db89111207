"""Latent attention on meshes, against one device: its values are narrower than its keys.

Against transformers it is compared in `tests/outside`, also on meshes.
"""

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import MODELS, run
from oracles import fused, ragged

from jaxpipe.core.contract.parameter import TP
from jaxpipe.core.mesh import TensorParallel
from jaxpipe.model import FAMILIES
from jaxpipe.model.options import Sharing


def check(*args, **how):
    with jax.enable_x64(True):
        assert_same(*run(*args, dtype=jnp.float64, **how))


@pytest.mark.slow(unless=["packed_latent-1f1b-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("latent", "zb_h1", (2, 2, 2), {"slices": 2, "cp": 2, "sequence": True, "zero_stage": 3}),
        ("packed_latent", "1f1b", (2, 2, 2), {"cp": 2, "heads": 2, "slices": 2, "remat": "full"}),
        ("packed_latent", "zb_h1", (2, 4, 1), {"cp": 4, "heads": 2, "remat": "selective"}),
        ("latent", "dualpipe", (2, 2, 2), {"cp": 2, "heads": 1, "remat": "full"}),
        ("packed_latent", "zb_h1", (2, 2, 1), {"cp": 2, "heads": 1, "slices": 2}),
        ("packed_latent", "dualpipe", (2, 2, 2), {"cp": 2, "poison_bubbles": True}),
        ("latent", "interleaved_1f1b", (2, 1, 4), {"sequence": True, "zero_stage": 1}),
    ],
    ids=str,
)
def test_keys_and_values_of_every_device_and_slice(model, schedule, mesh, how):
    check(model, schedule, *mesh, **how)


@pytest.mark.extended
@pytest.mark.slow(unless=["latent_fused-zb_h1-*"])
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "how"),
    [
        ("latent_fused", "zb_h1", (2, 1, 1), {"slices": 4, "remat": "selective"}),
        ("latent_fused", "1f1b", (2, 2, 2), {"cp": 2, "heads": 1, "sequence": True}),
        ("packed_latent_fused", "zb_h1", (2, 2, 2), {"cp": 2, "slices": 2, "remat": "full"}),
    ],
    ids=str,
)
def test_the_fused_kernel_gets_values_as_wide_as_keys(model, schedule, mesh, how, monkeypatch):
    """Plain products replace cuDNN itself."""
    fused.stands_in(monkeypatch)
    ragged.stands_in(monkeypatch)
    check(model, schedule, *mesh, **how)


def test_heads_are_sharded_and_latents_are_not():
    sharing = Sharing(TensorParallel(2))
    decoder = FAMILIES["deepseek"].build(MODELS["latent"], sharing=sharing)
    found = decoder.leaves["layer"]["attn"]
    cuts = {name: spec.sharded for name, spec in found.items() if not isinstance(spec, dict)}
    assert cuts == {
        "wq_a": (), "wq_b": ((TP, 1),), "wkv_a": (), "wkv_b": ((TP, 1),), "wo": ((TP, 0),),
    }  # fmt: skip
    whole = found["wq_a"], found["wkv_a"], found["q_norm"]["scale"], found["kv_norm"]["scale"]
    assert all(spec.partial_grad_axes == (TP,) for spec in whole)
