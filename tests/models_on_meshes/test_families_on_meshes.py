"""Models of the further families on meshes against one device, in float64: loss and gradients."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import run
from oracles import fused

from jaxpipe.core.schedule import Lockstep
from jaxpipe.core.split import POLICIES
from jaxpipe.schedules import BUILDERS, FAMILIES, build

CASES = {
    # Two devices with one key/value head each, and four that share two.
    "biased, tp": ("biased", "zb_h1", (2, 1, 2), {"sequence": True}),
    "biased, shared heads": ("biased", "1f1b", (1, 2, 4), {"zero_stage": 3}),
    "gemma3": ("gemma3", "1f1b", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    "gemma3, ZeRO 3, ring": ("gemma3", "zb_h1", (2, 2, 1), {"cp": 2, "heads": 1, "zero_stage": 3}),
    "gemma3, packed, cp": ("packed_gemma3", "1f1b", (2, 2, 2), {"cp": 2, "sequence": True}),
    "gpt_oss": ("gpt_oss", "zb_h1", (2, 2, 2), {"sequence": True, "ep": 2}),
    "gpt_oss, whole experts": ("gpt_oss", "zb_h1", (2, 2, 2), {"sequence": True, "over_tp": True}),
    "gpt_oss, packed, exchanged heads": (
        "packed_gpt_oss",
        "1f1b",
        (2, 4, 1),
        {"cp": 2, "heads": 2, "ep": 2, "zero_stage": 3},
    ),
    "gpt_oss, ring": ("gpt_oss", "1f1b", (2, 2, 2), {"cp": 2, "heads": 1}),
    "gpt_oss, gathered keys": ("gpt_oss", "1f1b", (1, 2, 4), {"cp": 2, "sequence": True}),
    "gpt_oss, slices": ("gpt_oss", "1f1b", (2, 1, 2), {"slices": 2}),
    "gpt_oss, cuDNN": ("fused_gpt_oss", "1f1b", (2, 2, 2), {"cp": 2, "heads": 2}),
    "llama4, packed, ring": (
        "packed_llama4",
        "zb_h1",
        (2, 2, 2),
        {"cp": 2, "heads": 1, "ep": 2, "slices": 2, "sequence": True, "zero_stage": 3},
    ),
    "llama4, exchanged heads": ("llama4", "dualpipe", (2, 4, 1), {"cp": 2, "heads": 2, "ep": 4}),
    "llama4, gathered keys": ("llama4", "1f1b", (2, 2, 2), {"cp": 2, "remat": "full"}),
    "gemma3, slices": ("gemma3", "1f1b", (2, 1, 2), {"slices": 2}),
    "olmo2": ("olmo2", "zb_h1", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    "olmo2, slices": ("olmo2", "1f1b", (2, 1, 2), {"slices": 2, "remat": "full"}),
    "olmo3, packed, ring": (
        "packed_olmo3",
        "dualpipev",
        (2, 2, 2),
        {"cp": 2, "heads": 1, "zero_stage": 3},
    ),
    "minimax_m2": ("minimax_m2", "zb_h1", (2, 2, 2), {"ep": 2, "sequence": True}),
    "glm4_moe, all": (
        "packed_glm4_moe", "zb_h1", (2, 2, 2),
        {"cp": 2, "heads": 1, "slices": 2, "ep": 2, "sequence": True, "zero_stage": 3,
         "vocab_parallel": True, "poison_bubbles": True},
    ),
    "glm4": ("glm4", "zb_h1", (2, 2, 2), {"cp": 2, "heads": 1, "sequence": True}),
    "qwen3_next": ("qwen3_next", "zb_h1", (2, 1, 2), {"sequence": True}),
    "qwen3_next, slices": ("qwen3_next", "zb_h1", (2, 1, 2), {"slices": 4, "remat": "full"}),
    "qwen3_next, packed slices": (
        "packed_qwen3_next", "zb_h1", (2, 1, 1), {"slices": 2, "remat": "selective"},
    ),
    "qwen3_next, exchanged heads": ("packed_qwen3_next", "zb_h1", (2, 2, 1), {"cp": 2, "heads": 2}),
    "qwen3_next, shards": ("qwen3_next", "zb_h1", (1, 4, 2), {"cp": 4, "sequence": True}),
    "qwen3_next, packed shards": ("packed_qwen3_next", "zb_h1", (2, 2, 2), {"cp": 2, "ep": 2}),
    "qwen3_next, shards of slices": (  # of one token, where convolutions read two before it
        "qwen3_next", "1f1b", (2, 4, 1), {"cp": 4, "slices": 2, "remat": "full"},
    ),
    "qwen3_next, all, shards": (
        "packed_qwen3_next", "1f1b", (2, 2, 2),
        {"cp": 2, "slices": 2, "remat": "selective", "sequence": True, "zero_stage": 3, "ep": 2,
         "poison_bubbles": True},
    ),
    "qwen3_next, all": (
        "packed_qwen3_next", "1f1b", (2, 2, 2),
        {"cp": 2, "heads": 2, "slices": 2, "remat": "full", "sequence": True, "zero_stage": 3,
         "ep": 2, "poison_bubbles": True},
    ),
    "qwen3_next, predictions": (
        "packed_qwen3_next_ahead", "zb_h1", (2, 2, 2),
        {"cp": 2, "slices": 2, "remat": "selective", "sequence": True, "zero_stage": 3, "ep": 2},
    ),
    "qwen3_next, recomputed ahead": (
        "packed_qwen3_next", "zb_h1", (2, 2, 1), {"ep": 2, "zero_stage": 3, "remat": "ahead"},
    ),
    "kimi_linear": ("kimi_linear", "zb_h1", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    "kimi_linear, slices": ("kimi_linear", "zb_h1", (2, 1, 2), {"slices": 4, "remat": "full"}),
    "kimi_linear, packed slices": (
        "packed_kimi_linear", "zb_h1", (2, 1, 1), {"slices": 2, "remat": "selective"},
    ),
    "kimi_linear, all": (
        "packed_kimi_linear", "1f1b", (2, 2, 2),
        {"cp": 2, "heads": 2, "slices": 2, "remat": "full", "sequence": True, "zero_stage": 3,
         "ep": 2, "poison_bubbles": True},
    ),
    "kimi_linear, packed shards": (
        "packed_kimi_linear", "zb_h1", (2, 2, 2), {"cp": 2, "slices": 2, "remat": "full"},
    ),
    "kimi_linear, whole experts": (
        "packed_kimi_linear", "dualpipev", (2, 2, 2),
        {"ep": 2, "over_tp": True, "sequence": True, "zero_stage": 3,
         "reshard_after_forward": True, "remat": "ahead"},
    ),
    "qwen3_next, loops": (
        "packed_qwen3_next_runs", "zb_h1", (2, 2, 1),
        {"unroll_layers": 1, "cp": 2, "ep": 2, "zero_stage": 2, "remat": "selective",
         "poison_bubbles": True},
    ),
    "qwen3_next, loops, slices": (
        "packed_qwen3_next_runs", "1f1b", (2, 2, 1),
        {"unroll_layers": 1, "cp": 2, "slices": 2, "remat": "full", "poison_bubbles": True},
    ),
    "qwen3_next, loops, ZeRO 3": (
        "packed_qwen3_next_runs", "1f1b", (2, 2, 1),
        {"unroll_layers": 1, "zero_stage": 3, "reshard_after_forward": True, "slices": 2},
    ),
    "kimi_linear, loops": (
        "packed_kimi_linear_runs", "zb_h1", (2, 2, 1),
        {"unroll_layers": 1, "cp": 2, "slices": 2, "remat": "full", "poison_bubbles": True},
    ),
    "nemotron_h": ("nemotron_h", "zb_h1", (2, 1, 2), {"sequence": True}),
    "nemotron_h, slices": ("nemotron_h", "zb_h1", (2, 1, 2), {"slices": 4, "remat": "full"}),
    "nemotron_h, packed slices": (
        "packed_nemotron_h", "zb_h1", (2, 2, 1), {"slices": 2, "remat": "selective", "ep": 2},
    ),
    "nemotron_h, exchanged heads": ("nemotron_h", "zbv", (2, 2, 1), {"cp": 2, "heads": 2}),
    "nemotron_h, all": (
        "packed_nemotron_h", "1f1b", (2, 2, 2),
        {"cp": 2, "heads": 2, "slices": 2, "remat": "full", "sequence": True, "zero_stage": 3,
         "ep": 2, "poison_bubbles": True},
    ),
    "nemotron_h, shards of slices": (
        "packed_nemotron_h", "1f1b", (1, 4, 2),
        {"cp": 4, "slices": 2, "remat": "full", "ep": 2},
    ),
    "nemotron_h, recomputed ahead": (
        "packed_nemotron_h", "dualpipev", (2, 2, 1),
        {"ep": 2, "zero_stage": 3, "remat": "ahead"},
    ),
    "olmo_hybrid": ("packed_olmo_hybrid", "zb_h1", (2, 1, 2), {"slices": 2, "remat": "full"}),
    "olmo_hybrid, all": (
        "packed_olmo_hybrid", "zbv", (2, 2, 2),
        {"cp": 2, "heads": 2, "sequence": True, "zero_stage": 3, "poison_bubbles": True},
    ),
    "bamba": ("bamba", "zb_h1", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    # Devices of tp share the heads of the only group.
    "bamba, one group": ("packed_bamba", "zbv", (2, 1, 2), {"remat": "full"}),
    "bamba, all": (
        "packed_bamba", "1f1b", (2, 2, 2),
        {"cp": 2, "slices": 2, "remat": "selective", "sequence": True, "zero_stage": 3,
         "poison_bubbles": True},
    ),
    "granite_hybrid": (
        "packed_granite", "zb_h1", (2, 2, 2),
        {"ep": 2, "slices": 2, "remat": "full", "sequence": True, "vocab_parallel": True},
    ),
    "granite_hybrid, exchanged heads": (
        "packed_granite", "zbv", (2, 2, 1), {"cp": 2, "heads": 2, "ep": 2, "zero_stage": 3},
    ),
    "engram": ("engram", "zb_h1", (2, 1, 2), {"sequence": True, "vocab_parallel": True}),
    "engram, slices": ("engram", "zb_h1", (2, 1, 2), {"slices": 4, "remat": "full"}),
    "engram, exchanged heads": ("packed_engram", "zbv", (2, 2, 1), {"cp": 2, "heads": 2}),
    "engram, all": (
        "packed_engram", "zb_h1", (2, 2, 2),
        {"cp": 2, "heads": 1, "slices": 2, "ep": 2, "sequence": True, "zero_stage": 3,
         "reshard_after_forward": True, "remat": "selective", "poison_bubbles": True},
    ),
    "engram, four ranks": (
        "packed_engram", "1f1b", (4, 2, 1), {"cp": 2, "slices": 2, "ep": 2, "zero_stage": 2},
    ),
    "engram, loops": (
        "packed_engram_deep", "dualpipev", (2, 2, 2),
        {"unroll_layers": 1, "ep": 2, "zero_stage": 3, "remat": "ahead"},
    ),
    "nemotron_h, loops": (
        "packed_nemotron_h_runs", "1f1b", (2, 2, 1),
        {"unroll_layers": 1, "ep": 2, "zero_stage": 3, "reshard_after_forward": True},
    ),
    "gpt_oss, recomputed ahead": (
        "packed_gpt_oss",
        "1f1b",
        (2, 2, 2),
        {"cp": 2, "heads": 1, "sequence": True, "ep": 2, "remat": "ahead", "poison_bubbles": True},
    ),
    "deepseek, recomputed ahead": (
        "packed_mixture_ahead",
        "zb_h1",
        (2, 4, 1),
        {"ep": 2, "zero_stage": 3, "reshard_after_forward": True, "remat": "ahead"},
    ),
}  # fmt: skip
FEW = [
    "biased, shared heads",
    "gemma3, packed, cp",
    "gpt_oss, packed, exchanged heads",
    "llama4, packed, ring",
    "olmo2",
    "qwen3_next, exchanged heads",
    "qwen3_next, packed shards",
    "kimi_linear",
    "nemotron_h, recomputed ahead",
    "engram, all",
    "gpt_oss, recomputed ahead",
    "deepseek, recomputed ahead",
]


@pytest.mark.extended
@pytest.mark.slow(unless=FEW)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_of_one_device(case, monkeypatch):
    fused.stands_in(monkeypatch)
    model, schedule, mesh, how = CASES[case]
    lockstep = Lockstep(vocab_parallel=how.pop("vocab_parallel", False))
    with jax.enable_x64(True):
        got, want = run(model, schedule, *mesh, lockstep=lockstep, dtype=jnp.float64, **how)
        assert_same(got, want)


def cases():
    """Yield sinks, latent attention, hybrids, chosen keys and compressed entries.

    Each runs in every schedule, and all else combines: packed documents, ring attention, gathered
    keys or shards of a recurrence, slices where the schedule has them, tensor with sequence
    parallelism, experts and ZeRO 3 over replicas. On 4 ranks, where 8 devices are too few for tp
    and replicas, the two alternate.
    """
    rings = "packed_gpt_oss", "packed_mixture_ahead"
    hybrids = "packed_qwen3_next", "packed_kimi_linear", "packed_nemotron_h"
    models = *rings, *hybrids, "packed_entries", "packed_indexed"
    for (m, model), (s, schedule), pp in product(enumerate(models), enumerate(BUILDERS), (2, 4)):
        replicas = {"cp": 2, "ep": 2, "zero_stage": 3, "reshard_after_forward": True}
        replicas["heads"] = 1 if model in rings else 0
        how = {"remat": list(POLICIES)[(s + m) % 3], "poison_bubbles": True}
        if FAMILIES[schedule].has_option("slices"):
            how["slices"] = 2
        if pp == 2:
            mesh, how = (2, 2, 2), how | replicas | {"sequence": True}
        else:
            mesh = (4, 2, 1) if (s + m) % 2 else (4, 1, 2)
            how |= replicas if (s + m) % 2 else {"sequence": True}
        yield pytest.param(model, schedule, mesh, how, id=f"{model}-{schedule}-{pp}")


@pytest.mark.extended
@pytest.mark.slow(unless=["packed_gpt_oss-v_min-2", "packed_qwen3_next-interleaved_zb-2"])
@pytest.mark.parametrize(("model", "schedule", "mesh", "how"), [*cases()])
def test_every_schedule(model, schedule, mesh, how):
    if build(schedule, pp=mesh[0], microbatches=8).stages == 8:
        model += "_deep"
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, dtype=jnp.float64, **how))
