"""Steps of pairs of answers (DPO) under every schedule, against one device in float64."""

import jax
import pytest

from jaxpipe import config as configs
from jaxpipe import schedule as schedules
from jaxpipe.planning.checks import check_settings
from jaxpipe.verification.observed import compare
from jaxpipe.verification.verifying import Verification

PAIRS = """
[model]
n_layers = 4
d_model = 16
n_heads = 4
n_kv_heads = 2
d_ff = 24
vocab_size = 41
[parallel]
pp = 2
[train]
steps = 2
grad_accum_steps = 4
microbatch_size = 4
seq_len = 8
loss = "dpo"
[preference]
beta = 0.5
label_smoothing = 0.1
[data]
source = "file"
path = "pairs"
"""
NAMES = [name for name in schedules.NAMES if name != "custom"]
WITH = {  # settings besides the schedule
    "zb_h1": ("parallel.defer_ends=true", "parallel.tp=2", "parallel.sequence_parallel=true"),
    "dualpipev": ("parallel.dp=2", "train.loss_chunks=2", "parallel.vocab_parallel_pp=true"),
    "gpipe": ("lora.rank=2", "train.variable_length=true", "train.length_bucket=2",
              "train.pad_to_multiple_of=1"),
    "1f1b": ("parallel.dp=2", "parallel.zero_stage=3", "train.remat=full"),
    "interleaved_1f1b": ("model.n_experts=4", "model.experts_per_token=2", "model.d_expert=8",
                         "model.router_aux_loss=0.1", "parallel.dp=2", "parallel.ep=2"),
}  # fmt: skip
BOUND = 1e-12


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.toml"
    path.write_text(PAIRS)
    return path


@pytest.mark.slow(unless=["zb_h1", "dualpipev"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_one_device(path, name):
    config = configs.load(path, [f"parallel.schedule={name}", *WITH.get(name, ())])
    check_settings(config)
    steps = Verification(config, say=lambda text: None)
    _, first = steps.first
    found = {one.what: one for one in compare(first, steps.want[0])}
    assert max(one.error for one in found.values()) < BOUND
