"""The dtype in which gradients are summed over replicas: float32, or bfloat16 on request."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from compare import relative

from jaxpipe import config as configs
from jaxpipe.core.mesh import REPLICA_AXES
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.trainer import Trainer

BFLOAT16 = "parallel.grad_reduce_dtype=bfloat16"
REDUCTIONS = {"psum", "psum_invariant", "reduce_scatter"}
LAYOUTS = {
    "ZeRO 0": ["parallel.zero_stage=0"],
    "ZeRO 1": ["parallel.zero_stage=1"],
    "ZeRO 2": ["parallel.zero_stage=2", "parallel.vocab_parallel_pp=true"],
    "ZeRO 3": ["parallel.zero_stage=3"],
    "ZeRO 3, layer by layer": ["parallel.zero_stage=3", "parallel.reshard_after_forward=true"],
    "HSDP": ["parallel.zero_stage=2", "parallel.dp=4", "parallel.dp_replicate=2"],
    "experts": [
        "parallel.zero_stage=2", "parallel.dp=4", "parallel.ep=2", "model.n_experts=4",
        "model.experts_per_token=2",
    ],
}  # fmt: skip


def trainer_of(*overrides):
    how = ["parallel.pp=2", "parallel.dp=2", "train.seq_len=16", "train.grad_accum_steps=2"]
    config = configs.load(SMALL, [*how, *overrides])
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


def gradients(trainer):
    batch, params = trainer.put(random_batch(trainer.config)), trainer.init().params
    return jax.jit(trainer.pipeline.step)(params, batch).gradients


def reductions(trainer):
    """Return the dtypes of sums over replicas alone, of arrays larger than a loss."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            axes = (axes,) if isinstance(axes, str) else axes
            several = {*axes} <= {*REPLICA_AXES} and any(
                trainer.mesh.shape[axis] > 1 for axis in axes
            )
            if eqn.primitive.name in REDUCTIONS and several:
                found.extend(v.aval.dtype.name for v in eqn.invars if v.aval.size > 8)
            for value in jax.tree.leaves(tuple(eqn.params.values())):
                if hasattr(value, "jaxpr"):
                    walk(value.jaxpr)
                elif hasattr(value, "eqns"):
                    walk(value)

    batch, params = trainer.put(random_batch(trainer.config)), trainer.init().params
    walk(jax.make_jaxpr(trainer.pipeline.step)(params, batch).jaxpr)
    return found


@pytest.mark.slow(
    only=["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 3, layer by layer", "HSDP", "experts"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(layout):
    """The error is that of bfloat16: 2^-8 of each replica's sum, and of their total."""
    plain, narrow = trainer_of(*LAYOUTS[layout]), trainer_of(*LAYOUTS[layout], BFLOAT16)
    wide, half = reductions(plain), reductions(narrow)
    assert len(wide) == len(half) > 4
    assert set(wide) == {"float32"}
    assert set(half) - {"int32"} == {"bfloat16"}
    want, got = gradients(plain), gradients(narrow)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, want)
    errors = jax.tree.leaves(jax.tree.map(relative, got, want))
    assert max(errors) < 2 * 2.0**-8
    assert np.median(errors) > 2.0**-12


def test_one_replica_has_nothing_to_sum():
    alone = ["parallel.dp=1"]
    got, want = (gradients(trainer_of(*alone, *more)) for more in ([BFLOAT16], []))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.extended
def test_left_alone_it_is_the_dtype_of_the_sums():
    trainer = trainer_of()
    assert trainer.execution.grad_reduce_dtype is None
    how = replace(trainer.execution, grad_reduce_dtype=jnp.float32)
    pipeline = replace(trainer.pipeline, execution=how)
    batch, params = trainer.put(random_batch(trainer.config)), trainer.init().params
    got = jax.jit(pipeline.step)(params, batch).gradients
    jax.tree.map(np.testing.assert_array_equal, got, gradients(trainer))
