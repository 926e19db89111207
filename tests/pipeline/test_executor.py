"""The pipelined step against the reference, over schedules, meshes, splits and ignored tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, cal_diff
from toy import TOY, toy_batch, toy_params

from jaxpipe.parallel import StageLayout, make_mesh
from jaxpipe.pipeline import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.schedule import build, lower


def run(name, counts, dp, microbatches, *, ignore="some", dtype=jnp.float32, key=0, **execution):
    """The pipeline's and the reference's `(losses, gradients)`, both in stage form."""
    pp, layout = len(counts), StageLayout(tuple(counts))
    shared, layers = toy_params(jax.random.key(key), layout.layers, dtype)
    batch = toy_batch(jax.random.key(key + 1), microbatches, 2 * dp, ignore)
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    schedule = build(name, pp=pp, microbatches=microbatches)
    pipeline = Pipeline(TOY, schedule, mesh, counts, Execution(**execution))
    params = {"shared": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.losses_and_gradients)(params, batch)
    losses, gradients = losses_and_gradients_ref(TOY, shared, layers, batch)
    want = losses, gradients | {"layers": layout.stack(gradients["layers"])}
    return got, want


EVEN = {1: [3], 2: [2, 2], 3: [1, 1, 1], 4: [1, 1, 1, 1], 8: [1] * 8}
UNEVEN = {1: [5], 2: [3, 1], 3: [1, 3, 2], 4: [1, 2, 2, 1], 8: [2, 1, 1, 2, 1, 1, 1, 1]}
MESHES = [(pp, dp) for pp in EVEN for dp in (1, 2) if pp * dp <= 8]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp"), MESHES)
@pytest.mark.parametrize("split", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_equals_reference(name, pp, dp, split):
    microbatches = {1: 3, 2: 5, 3: 7, 4: 6, 8: 11}[pp]  # not multiples of pp
    assert_close(*run(name, split[pp], dp, microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "bfs"])
@pytest.mark.parametrize(("pp", "microbatches"), [(4, 1), (4, 3), (4, 4), (4, 8), (8, 5)])
def test_any_number_of_microbatches(name, pp, microbatches):
    assert_close(*run(name, EVEN[pp], 1, microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ignore", ["none", "whole"])
def test_ignored_tokens(name, ignore):
    got, want = run(name, [2, 1], 2, 5, ignore=ignore)
    assert_close(got, want)
    if ignore == "whole":
        assert got[0][2] == 0


def test_no_valid_token_at_all():
    shared, layers = toy_params(jax.random.key(0), 2)
    batch = toy_batch(jax.random.key(1), 2, 2)
    batch["targets"] = jnp.full_like(batch["targets"], -100)
    params = {"shared": shared, "layers": StageLayout((1, 1)).stack(layers)}
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(TOY, build("1f1b", pp=2, microbatches=2), mesh)
    losses, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
    assert not losses.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2), (3, 2), (4, 2), (8, 1)])
def test_equals_reference_in_double_precision(name, pp, dp):
    with jax.enable_x64(True):
        got, want = run(name, UNEVEN[pp], dp, pp + 2, dtype=jnp.float64)
        assert got[1]["layers"][0]["up"].dtype == jnp.float64
        worst = jax.tree.map(cal_diff, got, want)
    assert max(jax.tree.leaves(worst)) < 1e-13, worst


@pytest.mark.parametrize("transfer_ticks", [1, 2])
@pytest.mark.parametrize("in_flight", [None, 2, 7])
def test_transfer_and_pairing_change_nothing(transfer_ticks, in_flight):
    execution = {"transfer_ticks": transfer_ticks, "in_flight": in_flight}
    assert_close(*run("1f1b", [1, 2, 2, 1], 2, 6, **execution))


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_rematerialisation_changes_nothing(remat):
    assert_close(*run("1f1b", [2, 1], 1, 4, remat=remat))


@pytest.mark.parametrize("transfer_ticks", [1, 2])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("counts", [[1, 2, 2, 1], [1, 1, 1, 1]], ids=["uneven", "even"])
def test_poisoned_bubbles_leak_nothing(name, counts, transfer_ticks):
    clean, _ = run(name, counts, 2, 3, transfer_ticks=transfer_ticks)
    poisoned, _ = run(name, counts, 2, 3, transfer_ticks=transfer_ticks, poison_bubbles=True)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.parametrize("counts", [[3], [2, 2], [1, 3, 2]])
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_forward_only_gives_the_same_losses(counts, transfer_ticks):
    pp, layout = len(counts), StageLayout(tuple(counts))
    shared, layers = toy_params(jax.random.key(0), layout.layers)
    batch = toy_batch(jax.random.key(1), 5, 4)
    mesh = make_mesh(pp, 2, devices=jax.devices()[: 2 * pp])
    schedule = build("1f1b", pp=pp, microbatches=5)
    execution = Execution(transfer_ticks=transfer_ticks)
    pipeline = Pipeline(TOY, schedule, mesh, counts, execution)
    params = {"shared": shared, "layers": layout.stack(layers)}
    losses = jax.jit(pipeline.losses)(params, batch)
    want, _ = losses_and_gradients_ref(TOY, shared, layers, batch)
    np.testing.assert_allclose(losses, want, rtol=1e-6, atol=1e-9)


def _swap_slots(columns):
    columns["residual_read"][columns["gradient"] == 1] ^= 1


def _store_late(columns):
    columns["dy_arrive"][1:] = columns["dy_arrive"][:-1].copy()


def _drop_a_gradient(columns):
    columns["gradient"][columns["gradient"][:, 1].argmax(), 1] = 0


@pytest.mark.parametrize("fault", [_swap_slots, _store_late, _drop_a_gradient])
def test_a_planted_fault_is_caught(monkeypatch, fault):
    """The comparison with the reference sees one wrong entry of the tables."""

    def faulty(*args, **kwargs):
        tables = lower(*args, **kwargs)
        fault(tables.columns)
        return tables

    monkeypatch.setattr("jaxpipe.pipeline.executor.lower", faulty)
    with pytest.raises(AssertionError):
        assert_close(*run("1f1b", [1, 1, 1, 1], 1, 6))
