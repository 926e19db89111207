"""`train.remat = "ahead"` from the configuration to the step: what it gains, needs and computes."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.planning import resolve
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.devices import Devices
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"


def plan_of(name, remat, *more):
    config = configs.load(str(CONFIGS / f"{name}.toml"), [f"train.remat={remat}", *more])
    return resolve(config, Devices.planned(config))


def seconds(plan):
    return scan_time(plan.schedule, plan.costs, plan.lockstep)


def test_it_gains_what_ranks_would_wait():
    full, ahead = (plan_of("llama3_70b_32gpu_tp4_pp4", remat) for remat in ("full", "ahead"))
    assert not full.schedule.recomputes
    assert ahead.schedule.recomputes
    assert seconds(ahead) < 0.97 * seconds(full)
    one_more = ahead.memory.activations - full.memory.activations
    assert 0 < one_more < plan_of("llama3_70b_32gpu_tp4_pp4", "selective").memory.activations / 2


def test_b_and_r_have_the_products_of_b_with_full_remat():
    """And R copies more, since it writes residuals for B."""
    full, ahead = (plan_of("qwen3_8b_pp2", remat) for remat in ("full", "ahead"))
    (alone,), (split,) = (costs_of(plan.config).kinds.values() for plan in (full, ahead))
    np.testing.assert_allclose(split.B + split.W + split.R, alone.B + alone.W, rtol=0.01)
    assert sum(map(sum, (ahead.costs.B, ahead.costs.R))) > sum(full.costs.B)


@pytest.mark.parametrize("other", ["parallel.slices=2", "train.offload_layers=1"])
def test_it_is_refused_with(other):
    config = configs.load(str(CONFIGS / "llama3_8b_pp4.toml"), ["train.remat=ahead", other])
    with pytest.raises(ConfigError, match=other.split("=")[0]):
        check_settings(config)


@pytest.mark.extended
def test_a_step_is_that_of_full_rematerialisation():
    results = {}
    for remat in ("full", "ahead"):
        small = ["model.n_layers=4", "model.d_model=32", "model.d_ff=64", "train.seq_len=16"]
        more = [*small, "parallel.dp=1", "runtime.cpu_devices=4", f"train.remat={remat}"]
        config = configs.load(str(CONFIGS / "quickstart.toml"), more)
        trainer = Trainer.resolve(config, jax.devices()[:4])
        shapes = trainer.sharder.shapes(16, trains=True)
        batch = jax.tree.map(lambda like: np.ones(like.shape, like.dtype), shapes)
        _, results[remat] = trainer.step(trainer.init(), trainer.put(batch))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(results["ahead"][name], results["full"][name], rtol=1e-6)
