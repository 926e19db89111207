"""Steps of low-rank adapters under every schedule, against one device in float64."""

import jax
import pytest

from jaxpipe import config as configs
from jaxpipe import schedules
from jaxpipe.lab.verification.observed import compare
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.planning.rules.across import check_settings

ADAPTERS = """
[model]
n_layers = 4
d_model = 16
n_heads = 4
d_ff = 24
vocab_size = 41
[parallel]
pp = 2
[train]
steps = 2
grad_accum_steps = 4
microbatch_size = 2
seq_len = 8
[lora]
rank = 3
alpha = 6.0
[optimizer]
eps = 1e-2  # where gradients nearly vanish Adam would turn rounding into whole updates
"""
NAMES = [name for name in schedules.NAMES if name != "custom"]
LLAMA = ("model.n_kv_heads=2",)
EXPERTS = ("model.n_experts=4", "model.experts_per_token=2", "model.d_expert=8")
AHEAD = (  # DeepSeek with a layer that predicts a further token
    "model.family=deepseek", "model.n_layers=3", "model.q_lora_rank=8", "model.kv_lora_rank=6",
    "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=6",
    "model.mtp_depth=1",
)  # fmt: skip
WITH = {  # settings besides the schedule
    "1f1b": (*AHEAD, *EXPERTS, "parallel.dp=2", "parallel.ep=2", "parallel.zero_stage=1"),
    "zb_h1": (*AHEAD, "parallel.tp=2", "parallel.vocab_parallel_pp=true"),
    "gpipe": (*LLAMA, "parallel.dp=2", "parallel.zero_stage=3"),
    "interleaved_1f1b": (*LLAMA, *EXPERTS, "parallel.dp=2", "parallel.ep=2", "parallel.tp=2"),
    "zb_h2": (*LLAMA, *EXPERTS, "parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true",
              "parallel.ep=4", "parallel.ep_over_tp=true"),
    "zbv": (*LLAMA, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "dualpipev": (*LLAMA, "parallel.dp=2", "parallel.zero_stage=2", "train.remat=full"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.extended
@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_one_device(tmp_path, name):
    path = tmp_path / "adapters.toml"
    path.write_text(ADAPTERS)
    config = configs.load(path, [f"parallel.schedule={name}", *WITH.get(name, LLAMA)])
    check_settings(config)
    steps = Verification(config, say=lambda text: None)
    _, first = steps.first
    gradients = first.gradients.keys()
    assert gradients
    assert all("/lora/" in one for one in gradients)
    assert max(one.error for one in compare(first, steps.want[0])) < 1e-12
