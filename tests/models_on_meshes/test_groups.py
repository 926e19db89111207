"""HSDP: `dp_replicate` groups, each of which has all shards of parameters and moments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from compare import assert_same
from meshes import pipeline_of, run
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.training.trainer import Trainer

GROUPS = ["parallel.pp=2", "parallel.dp=4", "parallel.dp_replicate=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mesh", "how"),
    [
        ("1f1b", (2, 4, 1), {"zero_stage": 1}),
        ("zb_h1", (1, 4, 2), {"zero_stage": 2}),
        ("dualpipe", (2, 4, 1), {"zero_stage": 3, "reshard_after_forward": True}),
        ("1f1b", (2, 4, 1), {"zero_stage": 3, "cp": 2}),
    ],
)
def test_groups_are_one_device(schedule, mesh, how):
    with jax.enable_x64(True):
        got, want = run("one_kv", schedule, *mesh, replicate=2, dtype=jnp.float64, **how)
        assert_same(got, want)


def test_what_is_gathered_comes_from_the_group():
    pipeline, _, params, batch = pipeline_of(
        "one_kv", "1f1b", 2, 4, 1, replicate=2, zero_stage=3, reshard_after_forward=True
    )
    text = str(jax.make_jaxpr(pipeline.step)(params, batch))
    over = {
        op: set(re.findall(rf"{op}\[[^\]]*?(?:axes|axis_name)=\(?([^)\n]*)", text))
        for op in ("all_gather", "reduce_scatter", "psum")
    }
    assert not any("rp" in axes for axes in over["all_gather"] | over["reduce_scatter"])
    assert any("dp" in axes for axes in over["all_gather"])
    assert any("rp" in axes for axes in over["psum"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_device_holds_what_it_would_in_its_group_alone(stage):
    zero = f"parallel.zero_stage={stage}"
    groups = Trainer.resolve(configs.load(SMALL, [*GROUPS, zero]))
    alone = Trainer.resolve(
        configs.load(SMALL, ["parallel.pp=2", "parallel.dp=2", zero]), tuple(jax.devices()[:4])
    )

    def shards(trainer):
        places = jax.tree.leaves(trainer.state_shardings)
        return [
            place.shard_shape(leaf.shape)
            for leaf, place in zip(jax.tree.leaves(trainer.state_shapes), places)
        ]

    assert shards(groups) == shards(alone)


@pytest.mark.slow
def test_groups_train_as_plain_replicas_do():
    batch = {name: np.arange(4 * 4 * 32, dtype=np.int32).reshape(4, 4, 32) % 97
             for name in ("inputs", "targets")}  # fmt: skip
    found = []
    for groups in (1, 2):
        overrides = [*GROUPS, f"parallel.dp_replicate={groups}", "parallel.zero_stage=2"]
        trainer = Trainer.resolve(configs.load(SMALL, overrides))
        state, _ = trainer.train_step(trainer.init(), trainer.put(batch))
        _, metrics = trainer.train_step(state, trainer.put(batch))
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["parallel.dp_replicate=3"], "dp=4 must be a multiple of parallel.dp_replicate=3"),
        (["parallel.cp=4"], "dp=4 must be a multiple of .*dp_replicate=2 x parallel.cp=4"),
        (["parallel.zero_stage=0"], "dp_replicate=2 needs parallel.zero_stage above 0"),
    ],
)
def test_groups_that_cannot_be(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolved(configs.load(SMALL, [*GROUPS, *overrides]))
