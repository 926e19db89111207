"""The pipelined step against the reference: every program that tables lead to, in float64.

`test_lower.py` proves that tables of any size deliver every value to where it is read. Here every
program that the executor traces for them is run: one case for each `signature`, with NaN in every
idle message and free slot.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import build
from signature import CASES, schedule_of, signature_of
from toy import TOY, toy_batch, toy_params
from toy_steps import check, run, uneven

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import ORDERS, Lockstep


@pytest.mark.extended(
    unless=[
        "1f1b-4-True-*",
        "zb_h1-4-True-1",
        "interleaved_zb-4-True-1",
        "zbv-4-True-1",
        "dualpipe-4-True-1",
    ]
)
@pytest.mark.slow(unless=["*-4-True-1", "1f1b-4-True-2", "zbv-2-False-2", "interleaved_zb-1-*"])
@pytest.mark.parametrize(("name", "pp", "more", "transfer_ticks"), CASES)
def test_every_program_equals_the_reference(name, pp, more, transfer_ticks):
    """With transfers of one tick, stages differ in length."""
    schedule = schedule_of(name, pp, more)
    counts = uneven(schedule.stages) if transfer_ticks == 1 else [1] * schedule.stages
    check(schedule, counts, 2, lockstep=Lockstep(transfer_ticks))


def test_the_cases_have_every_signature():
    run_here = {signature_of(*case) for case in CASES}
    every = [
        (name, pp, more, ticks)
        for name in ORDERS
        for pp in (1, 2, 4)
        for more in (False, True)
        for ticks in (1, 2)
    ]
    assert not [case for case in every if signature_of(*case) not in run_here]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
def test_groups_of_other_sizes(name):
    """Megatron's groups: three microbatches in one stage before the rank's next stage, then two."""
    check(build(name, pp=2, microbatches=5, breadth=3), [1, 2, 1, 1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_poison_changes_no_bit(name):
    schedule = schedule_of(name, 4)
    counts = uneven(schedule.stages)
    clean, _ = run(schedule, counts)
    poisoned, _ = run(schedule, counts, poison_bubbles=True)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.extended(unless=["full-1f1b"])
@pytest.mark.slow(unless=["selective-dualpipe", "full-1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])  # one with BW; one with B, W and pairs
@pytest.mark.parametrize(
    "remat",
    ["selective", "full", jax.checkpoint_policies.dots_saveable],
    ids=["selective", "full", "jax's own"],
)
def test_rematerialisation_changes_nothing(name, remat):
    schedule = schedule_of(name, 2)
    check(schedule, uneven(schedule.stages), remat=remat)


@pytest.mark.extended
@pytest.mark.slow(unless=["zb_h2"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zbv", "dualpipe"])
def test_deferring_the_ends_changes_nothing(name):
    schedule = schedule_of(name, 4)
    check(schedule, uneven(schedule.stages), lockstep=Lockstep(defer_embed_head=True))


@pytest.mark.extended
def test_three_ranks():
    check(build("zb_h1", pp=3, microbatches=5), [1, 3, 2], 2)


@pytest.mark.extended
def test_three_stages_a_rank():
    schedule = build("interleaved_zb", pp=2, microbatches=4, virtual_stages=3)
    check(schedule, [2, 1, 1, 1, 2, 1])


@pytest.mark.extended(only=["none"])
@pytest.mark.parametrize("ignore", ["none", "whole"])
def test_ignored_tokens(ignore):
    losses = check(build("zb_h1", pp=2, microbatches=5), [2, 1], 2, ignore=ignore)
    assert (losses[2] == 0) == (ignore == "whole")


def test_no_valid_token_at_all():
    shared, layers = toy_params(0, 2)
    batch = toy_batch(1, 2, 2)
    batch["targets"] = jnp.full_like(batch["targets"], -100)
    params = {"embed_head": shared, "layers": StageLayout((1, 1)).stack(layers)}
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(TOY, build("1f1b", pp=2, microbatches=2), mesh)
    losses, gradients = jax.jit(pipeline.losses_and_gradients)(params, batch)
    assert not losses.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.extended
@pytest.mark.parametrize(("name", "in_flight"), [("dualpipe", 5), ("dualpipev", 8)])
def test_forwards_from_both_ends_run_ahead(name, in_flight):
    """F and BW of two chunks, which share cells in the schedule's own order."""
    schedule = build(name, pp=4, microbatches=10)
    check(schedule, uneven(schedule.stages), 2, lockstep=Lockstep(2, in_flight=in_flight))


@pytest.mark.extended(only=["2"])
@pytest.mark.parametrize("in_flight", [2, 7])
def test_running_ahead_changes_nothing(in_flight):
    """An F in a cell with a gradient of its stage; two-tick transfers trace the same program."""
    lockstep = Lockstep(in_flight=in_flight)
    check(build("1f1b", pp=4, microbatches=6), [1, 2, 2, 1], 2, lockstep=lockstep)


@pytest.mark.extended
@pytest.mark.slow(unless=["interleaved_1f1b"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_ticks_in_which_nothing_enters_change_no_bit(name):
    schedule = schedule_of(name, 4)
    counts = [1] * schedule.stages
    plain, _ = run(schedule, counts, lockstep=Lockstep(2))
    kept, _ = run(schedule, counts, lockstep=Lockstep(2, every=3, offset=1))
    jax.tree.map(np.testing.assert_array_equal, kept, plain)


@pytest.mark.extended
@pytest.mark.slow(only=["zb_h1-2"])
@pytest.mark.parametrize(("name", "pp"), [("1f1b", 4), ("zb_h1", 2)])
def test_exchanges_phased_change_no_bit(name, pp):
    """On two ranks the second phase has no pair."""
    schedule = schedule_of(name, pp)
    counts = uneven(schedule.stages)
    plain, _ = run(schedule, counts)
    phased, _ = run(schedule, counts, poison_bubbles=True, lockstep=Lockstep(phases=2))
    jax.tree.map(np.testing.assert_array_equal, phased, plain)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "transfer_ticks"), [("dualpipe", 1), ("dualpipev", 2)])
def test_halves_of_a_cell_in_two_branches(name, transfer_ticks):
    schedule = schedule_of(name, 4)
    check(schedule, [1] * schedule.stages, 2, lockstep=Lockstep(transfer_ticks, pairs=False))


@pytest.mark.extended(unless=["1f1b-2", "dualpipe-2"])
@pytest.mark.parametrize(
    ("name", "transfer_ticks"),
    [("1f1b", 2), ("interleaved_1f1b", 2), ("zbv", 1), ("zbv", 2), ("dualpipe", 2)],
)
def test_forward_only_gives_the_same_losses(name, transfer_ticks):
    schedule = schedule_of(name, 4)
    counts = uneven(schedule.stages)
    layout = StageLayout(tuple(counts), schedule.placement)
    shared, layers = toy_params(0, layout.layers)
    batch = toy_batch(1, schedule.microbatches, 4)
    mesh = make_mesh(4, 2, devices=jax.devices())
    execution = Execution(Lockstep(transfer_ticks))
    pipeline = Pipeline(TOY, schedule, mesh, counts, execution)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    losses = jax.jit(pipeline.losses)(params, batch)
    want, _ = losses_and_gradients_ref(TOY, shared, layers, batch)
    np.testing.assert_allclose(losses, want, rtol=1e-6, atol=1e-9)


@pytest.mark.extended
def test_forward_only_holds_nothing_and_so_has_no_limit():
    """A limit below the number of microbatches concerns only values that wait for gradients."""
    schedule = build("1f1b", pp=2, microbatches=4)
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(TOY, schedule, mesh, execution=Execution(Lockstep(in_flight=3)))
    shared, layers = toy_params(0, 2)
    params = {"embed_head": shared, "layers": StageLayout((1, 1)).stack(layers)}
    batch = toy_batch(1, 4, 2)
    losses = jax.jit(pipeline.losses)(params, batch)
    want, _ = losses_and_gradients_ref(TOY, shared, layers, batch)
    np.testing.assert_allclose(losses, want, rtol=1e-6, atol=1e-9)
