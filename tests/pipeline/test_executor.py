"""The pipelined step against the reference, over schedules, meshes, splits and ignored tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, assert_same
from legal import near
from toy import TOY, toy_batch, toy_params

from jaxpipe.parallel import StageLayout, make_mesh
from jaxpipe.pipeline import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.schedule import BUILDERS, FAMILIES, Lockstep, Op, build, lower


def run(schedule, counts, dp=1, *, ignore="some", dtype=jnp.float32, key=0, **execution):
    """The pipeline's and the reference's `(losses, gradients)`, both in stage form."""
    pp, layout = schedule.pp, StageLayout(tuple(counts), schedule.placement)
    shared, layers = toy_params(jax.random.key(key), layout.layers, dtype)
    batch = toy_batch(jax.random.key(key + 1), schedule.microbatches, 2 * dp, ignore)
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    pipeline = Pipeline(TOY, schedule, mesh, counts, Execution(**execution))
    params = {"shared": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.losses_and_gradients)(params, batch)
    losses, gradients = losses_and_gradients_ref(TOY, shared, layers, batch)
    want = losses, gradients | {"layers": layout.stack(gradients["layers"])}
    return got, want


def schedule_of(name, pp, *, more=False):
    """A schedule at its least microbatches, or at the next number above pp that it takes."""
    family = FAMILIES[name]
    above = 2 * pp if family.in_rounds else max(pp + 3, family.least(pp) + 2)
    return near(name, pp, above if more else family.least(pp), virtual_stages=2)


def uneven(stages):
    return [1 + (stage % 3 == 1) for stage in range(stages)]


def signature(tables):
    """What decides which program is traced; the rest of the tables is data that it reads.

    That data is proved in `test_lower.py`, which follows every value of every schedule.
    """
    holds = tuple(slots > 0 for slots in tables.slots)
    ops = tuple(tables.forwards), tuple(tables.gradients), tables.pairs
    return ops, len(tables.lanes), holds, tables.lockstep.transfer_ticks


# (name, pp, more) of programs that differ, and of both other numbers of ranks; pp=4 stands below.
OTHER_RANKS = [
    ("gpipe", 2, False), ("interleaved_1f1b", 2, True), ("zb_h1", 2, False), ("zbv", 2, True),
    ("dualpipe", 2, False), ("dualpipev", 2, True),
    ("1f1b", 8, True), ("bfs", 8, False), ("zb_h2", 8, True), ("interleaved_zb", 8, False),
    ("dualpipe", 8, True), ("dualpipev", 8, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pp", "more"), OTHER_RANKS)
def test_every_program_equals_the_reference(name, pp, more):
    schedule = schedule_of(name, pp, more=more)
    with jax.enable_x64(True):
        assert_same(*run(schedule, uneven(schedule.stages), 8 // pp, dtype=jnp.float64))


def test_the_cases_have_every_table_signature():
    """Of 156 combinations of schedule, ranks, microbatches and transfers some 15 differ."""

    def signatures(cases):
        return {
            signature(lower(schedule_of(name, pp, more=more), Lockstep(ticks)))
            for name, pp, more in cases
            for ticks in (1, 2)
        }

    four = [(name, 4, True) for name in BUILDERS]
    every = {(name, pp, more) for name in BUILDERS for pp in (2, 4, 8) for more in (False, True)}
    assert signatures([*OTHER_RANKS, *four]) == signatures(every)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_every_schedule_in_double_precision_with_poisoned_bubbles(name, transfer_ticks):
    """Idle messages and free slots hold NaN; with one tick's transfers, stages differ in length."""
    schedule = schedule_of(name, 4, more=True)
    counts = uneven(schedule.stages) if transfer_ticks == 1 else [1] * schedule.stages
    execution = {"lockstep": Lockstep(transfer_ticks), "poison_bubbles": True}
    with jax.enable_x64(True):
        got, want = run(schedule, counts, 2, dtype=jnp.float64, **execution)
        assert got[1]["layers"][0]["up"].dtype == jnp.float64
        assert_same(got, want)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_poison_changes_no_bit(name):
    schedule = schedule_of(name, 4, more=True)
    counts = uneven(schedule.stages)
    clean, _ = run(schedule, counts)
    poisoned, _ = run(schedule, counts, poison_bubbles=True)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zbv", "dualpipe"])
@pytest.mark.parametrize(
    "remat",
    ["selective", "full", jax.checkpoint_policies.dots_saveable],
    ids=["selective", "full", "jax's own"],
)
def test_rematerialisation_changes_nothing(name, remat):
    schedule = schedule_of(name, 2, more=True)
    assert_close(*run(schedule, uneven(schedule.stages), remat=remat))


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zbv", "dualpipe"])
@pytest.mark.parametrize("poison_bubbles", [False, True])
def test_deferring_the_ends_changes_nothing(name, poison_bubbles):
    schedule = schedule_of(name, 4, more=True)
    execution = {"lockstep": Lockstep(defer_ends=True), "poison_bubbles": poison_bubbles}
    assert_close(*run(schedule, uneven(schedule.stages), **execution))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("counts", [[3], [1, 1, 1], [1, 3, 2]], ids=str)
def test_any_number_of_ranks(name, counts):
    schedule = build(name, pp=len(counts), microbatches=len(counts) + 2)
    assert_close(*run(schedule, counts, 2))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_two_stages_on_a_single_rank(name):
    assert_close(*run(build(name, pp=1, microbatches=3), [2, 1]))


def test_three_stages_a_rank():
    schedule = build("interleaved_zb", pp=2, microbatches=4, virtual_stages=3)
    assert_close(*run(schedule, [2, 1, 1, 1, 2, 1]))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("ignore", ["none", "whole"])
def test_ignored_tokens(name, ignore):
    got, want = run(build(name, pp=2, microbatches=5), [2, 1], 2, ignore=ignore)
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


@pytest.mark.parametrize("transfer_ticks", [1, 2])
@pytest.mark.parametrize("in_flight", [2, 7])
def test_transfer_and_pairing_change_nothing(transfer_ticks, in_flight):
    lockstep = Lockstep(transfer_ticks, in_flight)
    assert_close(*run(build("1f1b", pp=4, microbatches=6), [1, 2, 2, 1], 2, lockstep=lockstep))


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_halves_of_a_cell_in_two_branches(name, transfer_ticks):
    schedule = schedule_of(name, 4, more=True)
    counts = uneven(schedule.stages) if transfer_ticks == 1 else [1] * schedule.stages
    execution = {"lockstep": Lockstep(transfer_ticks, pairs=False), "poison_bubbles": True}
    assert_close(*run(schedule, counts, 2, **execution))


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_forward_only_gives_the_same_losses(name, transfer_ticks):
    schedule = schedule_of(name, 4, more=True)
    counts = uneven(schedule.stages)
    layout = StageLayout(tuple(counts), schedule.placement)
    shared, layers = toy_params(jax.random.key(0), layout.layers)
    batch = toy_batch(jax.random.key(1), schedule.microbatches, 4)
    mesh = make_mesh(4, 2, devices=jax.devices())
    execution = Execution(Lockstep(transfer_ticks))
    pipeline = Pipeline(TOY, schedule, mesh, counts, execution)
    params = {"shared": shared, "layers": layout.stack(layers)}
    losses = jax.jit(pipeline.losses)(params, batch)
    want, _ = losses_and_gradients_ref(TOY, shared, layers, batch)
    np.testing.assert_allclose(losses, want, rtol=1e-6, atol=1e-9)


def test_forward_only_holds_nothing_and_so_has_no_limit():
    """A limit below the number of microbatches is for what waits for gradients."""
    schedule = build("1f1b", pp=2, microbatches=4)
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(TOY, schedule, mesh, execution=Execution(Lockstep(in_flight=3)))
    shared, layers = toy_params(jax.random.key(0), 2)
    params = {"shared": shared, "layers": StageLayout((1, 1)).stack(layers)}
    batch = toy_batch(jax.random.key(1), 4, 2)
    losses = jax.jit(pipeline.losses)(params, batch)
    want, _ = losses_and_gradients_ref(TOY, shared, layers, batch)
    np.testing.assert_allclose(losses, want, rtol=1e-6, atol=1e-9)


def _swap_slots(columns):
    columns.for_b_read[(columns.B + columns.BW) > 0] ^= 1


def _store_late(columns):
    columns.arrive[1][1:] = columns.arrive[1][:-1].copy()


def _drop(op):
    def fault(columns):
        column = columns.chunk_of(op)
        column[(column[:, 1] > 0).argmax(), 1] = 0

    fault.__name__ = f"drop_{op.name}"
    return fault


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("1f1b", _swap_slots),
        ("1f1b", _store_late),
        ("1f1b", _drop(Op.BW)),
        ("zb_h1", _swap_slots),
        ("zb_h1", _drop(Op.B)),
        ("zb_h1", _drop(Op.W)),
        ("zbv", _store_late),
        ("zbv", _drop(Op.W)),
        ("dualpipe", _drop(Op.W)),
        ("dualpipe", _store_late),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_caught(monkeypatch, name, fault):
    """The comparison with the reference sees one wrong entry of the tables."""

    def faulty(*args, **kwargs):
        tables = lower(*args, **kwargs)
        columns = jax.tree.map(np.array, tables.columns)
        fault(columns)
        return replace(tables, columns=columns)

    monkeypatch.setattr("jaxpipe.pipeline.executor.lower", faulty)
    schedule = schedule_of(name, 4, more=True)
    with pytest.raises(AssertionError):
        assert_close(*run(schedule, [1] * schedule.stages))
