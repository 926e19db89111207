"""Steps of pairs of answers (DPO) under every schedule, against one device in float64."""

import jax
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe import schedules
from jaxpipe.lab.verification.observed import compare
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.preference import DpoLoss
from jaxpipe.planning.rules.across import check_settings

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
    "zb_h1": ("parallel.defer_embed_head=true", "parallel.tp=2", "parallel.sequence_parallel=true"),
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


@pytest.mark.slow(unless=["zb_h1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_one_device(path, name):
    config = configs.load(path, [f"parallel.schedule={name}", *WITH.get(name, ())])
    check_settings(config)
    steps = Verification(config, say=lambda text: None)
    _, first = steps.first
    found = {one.what: one for one in compare(first, steps.want[0])}
    assert max(one.error for one in found.values()) < BOUND


def test_the_loss_and_its_metrics_written_out():
    """With smoothing, and a last pair that has no target and does not count."""
    rng = np.random.default_rng(0)
    counts = (rng.random((6, 5)) < 0.6) & (np.arange(6) < 4)[:, None]
    ours, reference = -rng.exponential(size=(2, 6, 5))
    rows = {"targets": np.where(counts, 1, IGNORE), "reference": reference}
    total, count, metrics = DpoLoss(0.5, 0.1)(np.where(counts, ours, 0), rows)
    chosen, rejected = 0.5 * np.where(counts, ours - reference, 0).sum(1).reshape(3, 2)[:2].T
    sigmoid = 1 / (1 + np.exp(rejected - chosen))
    want = -0.9 * np.log(sigmoid) - 0.1 * np.log(1 - sigmoid)
    np.testing.assert_allclose(total, want.sum(), rtol=1e-12)
    assert count == 2
    means = {name: float(value) for name, value in metrics.items()}
    assert means == pytest.approx({
        "reward_chosen": chosen.sum(), "reward_rejected": rejected.sum(),
        "reward_accuracy": (chosen > rejected).sum(),
    }, rel=1e-12)  # fmt: skip
