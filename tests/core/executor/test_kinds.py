"""Layers of several kinds, auxiliary outputs, stored values and experts, against one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from kinds import CHOICES, layer_params, mixed
from orders import build, near
from toy import toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.mesh import ReplicaFactors, StageLayout, make_mesh
from jaxpipe.core.schedule import ORDERS, Lockstep

LAYERS_OF = {
    "mixed": ("toy", "routed", "experts", "routed", "toy", "experts", "experts", "routed"),
    "first_other": ("toy", "toy", *("routed",) * 6),
}


def problem(order, microbatches, examples, dtype=jnp.float64):
    """Return shared parameters, layers in order, a batch and variables."""
    shared, toys = toy_params(0, len(order), dtype)
    layers = [
        toys[i] if kind == "toy" else layer_params(jax.random.key(100 + i), kind, dtype)
        for i, kind in enumerate(order)
    ]
    bias = 0.1 * jax.random.normal(jax.random.key(5), (len(order), CHOICES), dtype)
    return shared, jax.device_get(layers), toy_batch(1, microbatches, examples), {"bias": bias}


def run(schedule, order, *, dp=2, ep=2, change=lambda functions: functions, **execution):
    """Return `(got, want)` of a step on a mesh and on one device, gradients stage-stacked."""
    examples = 2 * dp
    shared, layers, batch, variables = problem(order, schedule.microbatches, examples)
    counts = [len(order) // schedule.stages] * schedule.stages
    mesh = make_mesh(
        schedule.pp, dp, devices=jax.devices()[: schedule.pp * dp], factors=ReplicaFactors(ep=ep)
    )
    execution = Execution(**execution)
    pipeline = Pipeline(change(mixed(order, ep)), schedule, mesh, counts, execution)
    layout = StageLayout(tuple(counts), schedule.placement, order)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.step)(params, batch, variables)
    reference = change(mixed(order))
    want = jax.device_get(step_ref(reference, shared, layers, batch, variables=variables))
    staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
    return got, want._replace(gradients=staged)


OF_PLACEMENTS = ("1f1b", "interleaved_1f1b", "zbv", "dualpipe")  # one schedule of each placement


@pytest.mark.extended
@pytest.mark.slow(unless=["zbv-first_other"])
@pytest.mark.parametrize(
    ("name", "order"),
    [(name, "mixed") for name in ORDERS] + [(name, "first_other") for name in OF_PLACEMENTS],
)
def test_kinds_under_every_schedule(name, order):
    schedule = near(name, 2, 1)
    with jax.enable_x64(True):
        got, want = run(schedule, LAYERS_OF[order], dp=4, zero_stage=2, poison_bubbles=True)
        assert_same(got, want)
        counts = np.asarray(got.aux.sums["counts"])
        tokens = schedule.microbatches * 8 * 6
        routed = [kind == "routed" for kind in LAYERS_OF[order]]
        np.testing.assert_array_equal(counts.sum(1), np.where(routed, tokens, 0))


@pytest.mark.extended
@pytest.mark.slow(unless=["3-True-full"])
@pytest.mark.parametrize(
    ("stage", "reshard", "remat"),
    [(0, False, "none"), (0, False, "selective"), (0, False, "full"), (1, False, "none"),
     (3, False, "none"), (3, True, "none"), (3, True, "selective"), (3, True, "full")],
)  # fmt: skip
def test_kinds_however_they_are_stored(stage, reshard, remat):
    schedule = build("zb_h1", pp=4, microbatches=5)
    how = {"zero_stage": stage, "reshard_after_forward": reshard, "remat": remat}
    with jax.enable_x64(True):
        assert_same(*run(schedule, LAYERS_OF["mixed"], **how))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_what_layers_lose_is_in_none_of_the_heads_losses(name):
    def two(functions):
        def head(shared, x, rows):
            return jnp.stack([functions.head(shared, x, rows), 0.1 * jnp.sum(jnp.tanh(x) ** 2)])

        return replace(functions, head=head, losses=("loss", "size"))

    with jax.enable_x64(True):
        got, want = run(near(name, 2, 1), LAYERS_OF["mixed"], change=two)
        assert got.losses.shape == want.losses.shape == (len(want.losses), 2)
        for index in range(2):
            assert_same(got.losses[:, index], want.losses[:, index])
        assert_same((got.aux_losses, got.gradients), (want.aux_losses, want.gradients))
        assert (want.aux_losses > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_two_tick_transfers_and_pairs(name):
    with jax.enable_x64(True):
        lockstep = Lockstep(transfer_ticks=2)
        assert_same(*run(near(name, 2, 1), LAYERS_OF["mixed"], dp=4, lockstep=lockstep))
