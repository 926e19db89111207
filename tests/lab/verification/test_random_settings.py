"""Random settings compute what one device computes, or are refused in a sentence.

`RANDOM_SETTINGS=100 pytest tests/lab/verification/test_random_settings.py -m ''` draws more of
them.
"""

import os
import random
from pathlib import Path
from typing import Any

import jax
import pytest
import tomli_w

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.lab.verification.observed import Deviation
from jaxpipe.lab.verification.shrinking import shrink
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.schedules import NAMES
from jaxpipe.verify import TOLERANCE

# The values that each setting is drawn from. Settings that do not go together are refused, and
# drawn again.
MODEL: dict[str, Any] = {
    "n_layers": [4, 5, 8], "d_model": [64], "n_heads": [8], "d_ff": [96], "vocab_size": [64, 67],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "n_kv_heads": [2, 4, 8], "sliding_window": [0, 0, 16], "global_every": [0, 0, 2],
        "qk_norm": [False, True], "qkv_bias": [False, True], "tie_embeddings": [False, True],
    },
    "deepseek": {
        "kv_lora_rank": [16], "q_lora_rank": [0, 24], "qk_nope_head_dim": [16], "v_head_dim": [8],
        "qk_rope_head_dim": [8], "mtp_depth": [0, 1, 2], "tie_embeddings": [False, True],
    },
    "gpt_oss": {"n_kv_heads": [4, 8], "sliding_window": [16], "n_experts": [4, 8]},
    "gemma3": {"n_kv_heads": [4], "sliding_window": [16], "logit_softcap": [0.0, 30.0]},
    "llama4": {"n_kv_heads": [4], "attention_chunk": [16], "nope_every": [2], "n_experts": [4]},
    "gpt2": {},
}  # fmt: skip
EXPERTS: dict[str, Any] = {  # of families that have them
    "n_experts": [4, 8], "experts_per_token": [2, 2, 3], "d_expert": [32],
    "capacity_factor": [0.0, 1.0], "router_aux_loss": [0.0, 0.01], "router_z_loss": [0.0, 0.01],
    "router_score": ["softmax", "sigmoid"], "router_bias_rate": [0.0, 0.001],
    "shared_experts": [0, 0, 1], "first_dense_layers": [0, 0, 1],
}  # fmt: skip
SECTIONS: dict[str, dict[str, Any]] = {
    "parallel": {
        "pp": [1, 2, 2, 3, 4], "dp": [1, 2, 4], "tp": [1, 1, 2], "ep": [1, 1, 1, 2],
        "cp": [1, 1, 2], "cp_method": ["gather", "ring", "ulysses"], "zero_stage": [0, 1, 2, 3],
        "dp_replicate": [1, 1, 1, 2], "sequence_parallel": [False, False, False, True],
        "slices": [1, 1, 1, 2], "vocab_parallel_pp": [False, False, True],
        "schedule": [name for name in NAMES if name != "custom"],
        "layer_split": ["even", "balanced"], "defer_embed_head": [False, False, True],
        "transfer_ticks": [0, 1, 2], "in_flight": [0, 0, 0, 7], "unroll_layers": [0, 0, 1],
        "reshard_after_forward": ["auto", "auto", "auto", True, False],
    },
    "train": {
        "steps": [10], "grad_accum_steps": [4, 8], "microbatch_size": [1, 2, 3], "seq_len": [64],
        "remat": ["none", "selective", "full"], "offload_layers": [0, 0, 0, 1],
        "remat_layers": [0, 0, 0, 1],
        "loss_chunks": [1, 1, 2], "z_loss": [0.0, 0.0, 0.001],
    },
    "data": {"packing": ["none", "none", "best_fit", "sequential"]},
    "lora": {"rank": [0, 0, 0, 4]},
    "optimizer": {"name": ["adamw", "adamw", "lion", "muon", "adafactor"], "clip_norm": [0.0, 1.0]},
}  # fmt: skip


def draw(rng: random.Random) -> dict[str, Any]:
    """Return settings by section."""
    family = rng.choice(sorted(FAMILIES))
    model = MODEL | FAMILIES[family]
    if "n_experts" in model or (family in ("llama", "deepseek") and rng.random() < 0.5):
        model = EXPERTS | model
    sections = {"model": {"family": [family]} | model} | SECTIONS
    return {
        section: {name: rng.choice(values) for name, values in fields.items()}
        for section, fields in sections.items()
    }


def find_deviations(path: Path) -> list[Deviation] | None:
    """Return what `verify` finds; None where settings are refused or need more devices."""
    try:
        config = configs.load(str(path), [])
        check_settings(config)
        config = shrink(config).config
        check_settings(config)
        if config.parallel.devices > len(jax.devices()):
            return None
        return Verification(config, lambda line: None).deviations()
    except (ConfigError, ScheduleError):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_SETTINGS", "5"))))
def test_random_settings_equal_one_device(seed, tmp_path):
    rng, path, found = random.Random(seed), tmp_path / "drawn.toml", None
    with jax.enable_x64(True):
        while found is None:
            path.write_text(tomli_w.dumps(draw(rng)))
            found = find_deviations(path)
    assert [one for one in found if not one.error <= TOLERANCE] == [], path.read_text()
