"""`[debug]`: messages printed and poisoned, and steps without an update."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import TOY, toy_batch, toy_params

from jaxpipe.config import ConfigError, load
from jaxpipe.core.contract import Context
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.executor.messages import MessagePrinter
from jaxpipe.core.mesh import make_mesh
from jaxpipe.core.schedule import Lockstep
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.schedules import build
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.trainer import Trainer

SMALL = "tests/data/small.toml"
PP, MICROBATCHES = 2, 3
LINE = re.compile(
    r"tick (\d+) pp_rank (\d+) replica (\d+) tp 0 (sends|receives) (y|dx) (?:to|from) pp_rank (\d)"
    r"(?: into slot \d+)?: norm (\S+)"
)


def printed(capfd, **how):
    """Return the printed lines of a toy step: tick, rank, replica, verb, kind, other rank, norm."""
    lockstep = how.pop("lockstep", Lockstep())
    mesh = make_mesh(PP, 2, devices=jax.devices()[: 2 * PP])
    schedule = build("1f1b", pp=PP, microbatches=MICROBATCHES)
    execution = Execution(lockstep, printer=MessagePrinter(**how))
    pipeline = Pipeline(TOY, schedule, mesh, (1, 1), execution)
    shared, layers = toy_params(0, 2, jnp.float32)
    params = {"embed_head": shared, "layers": pipeline.layout(1).stack(layers)}
    batch = toy_batch(1, MICROBATCHES, 4)
    jax.block_until_ready(jax.jit(pipeline.step)(params, batch))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    found = [LINE.fullmatch(line).groups() for line in lines if line.startswith("tick")]
    of_replicas = [jax.tree.map(lambda leaf, i=i: leaf[:, 2 * i :][:, :2], batch) for i in (0, 1)]
    return found, norms(shared, layers[0], of_replicas)


def norms(shared, layer, of_replicas):
    """Return by replica the first rank's output norms of every microbatch, without the pipeline."""
    found = []
    for batch in of_replicas:
        rows = [jax.tree.map(lambda leaf, m=m: leaf[m], batch) for m in range(MICROBATCHES)]
        found.append([])
        for row in rows:
            x = TOY.embed(shared, row)
            [kind] = TOY.kinds_by_name.values()
            y = kind.layer(layer, x, Context(row, jnp.int32(0))).y
            found[-1].append(float(jnp.linalg.norm(y)))
    return found


@pytest.mark.parametrize("transfer_ticks", [1, 2])
def test_every_message_is_printed_where_it_leaves_and_where_it_arrives(capfd, transfer_ticks):
    lines, want = printed(capfd, lockstep=Lockstep(transfer_ticks))
    count = Counter((rank, verb, kind, other) for _, rank, _, verb, kind, other, _ in lines)
    each = 2 * MICROBATCHES  # of two replicas
    assert count == {
        ("0", "sends", "y", "1"): each, ("1", "receives", "y", "0"): each,
        ("1", "sends", "dx", "0"): each, ("0", "receives", "dx", "1"): each,
    }  # fmt: skip
    sent, received = (
        sorted((kind, replica, int(tick) + late, norm)
               for tick, _, replica, verb, kind, _, norm in lines if verb == which)
        for which, late in (("sends", transfer_ticks - 1), ("receives", 0))
    )  # fmt: skip
    assert sent == received
    for replica, expected in enumerate(want):
        found = sorted(
            (int(tick), float(norm))
            for tick, rank, of, verb, _, _, norm in lines
            if (rank, of, verb) == ("0", str(replica), "sends")
        )
        np.testing.assert_allclose([norm for _, norm in found], expected, rtol=1e-6)


def test_ticks_and_ranks_may_be_chosen(capfd):
    every, _ = printed(capfd)
    some, _ = printed(capfd, ticks=(2, 3), pp_ranks=(1,))
    assert sorted(some) == sorted(line for line in every if line[0] in "23" and line[1] == "1")
    assert 0 < len(some) < len(every)


MESH = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.schedule=zb_h1"]


def trainer_of(*overrides):
    config = load(SMALL, [*MESH, *overrides, "runtime.cpu_devices=8"])
    check_settings(config)
    return Trainer.resolve(config)


def one_step(trainer, pipeline=None):
    if pipeline is not None:
        trainer.__dict__["pipeline"] = pipeline
    batch = trainer.put(random_batch(trainer.config))
    return trainer.train_step(trainer.init(), batch)


def reading_a_dummy(pipeline):
    """Return the pipeline with one F that reads the dummy slot."""
    tables = pipeline.tables
    columns = jax.tree.map(np.array, tables.columns)
    tick, rank = np.argwhere((columns.F > 0) & (columns.embed == 0))[0]
    columns.x_read[tick, rank] = tables.slots.inbox
    wrong = replace(pipeline)
    wrong.__dict__["tables"] = replace(tables, columns=columns)
    return wrong


@pytest.mark.slow
def test_poison_shows_who_reads_an_idle_message():
    clean, poisoned = trainer_of(), trainer_of("debug.poison_messages=true")
    (state, metrics), (same, also) = one_step(clean), one_step(poisoned)
    assert float(metrics["loss"]) == float(also["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    for overrides, finite in ((), True), (("debug.poison_messages=true",), False):
        trainer = trainer_of(*overrides)
        _, metrics = one_step(trainer, reading_a_dummy(trainer.pipeline))
        assert np.isfinite(float(metrics["loss"])) == finite


@pytest.mark.slow(only=["more0", "more1"])
@pytest.mark.parametrize("more", [[], ["parallel.zero_stage=3", "optimizer.name=muon"]])
def test_steps_without_an_update(more):
    trainer, plain = trainer_of("debug.skip_update=true", *more), trainer_of(*more)
    before = jax.tree.map(np.asarray, trainer.init())
    state, metrics = one_step(trainer)
    updated, wanted = one_step(plain)
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == float(wanted[name])
    assert int(state.step) == int(updated.step) == 1
    for part in ("params", "optimizer", "variables"):
        got, want = getattr(state, part), getattr(before, part)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), updated.params, before.params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["debug.ticks=[0,1]"], "is read only with debug.print_messages, but"),
        (["debug.print_messages=true", "debug.ticks=[3]"], "must be the first and the last tick"),
        (["debug.print_messages=true", "debug.ticks=[3,1]"], "must be the first and the last"),
        (["debug.print_messages=true", "debug.ticks=[-1,1]"], "must be the first and the last"),
        (["debug.print_messages=true", "debug.pp_ranks=[2]"], "there are ranks 0 to 1"),
        (["debug.print_messages=true", "parallel.pp=1", "parallel.dp=4"], "sends no messages"),
        (["debug.skip_update=true", "train.fused_steps=2"], "debug.skip_update=true: ranks update"),
    ],
)
def test_what_cannot_be_debugged_so_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        trainer_of(*overrides)
