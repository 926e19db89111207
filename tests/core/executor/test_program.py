"""The compiled program of the step: permutes, copies, size and FLOPs."""

import re

import jax
import jax.numpy as jnp
import pytest
from programs import LAYERS_EACH, compiled, dot_flops, executed_flops, traced
from toy import KIND, TOY, toy_batch, toy_params

from jaxpipe.core.contract import Context
from jaxpipe.core.executor.ring_buffers import ring_lengths, values_by_use
from jaxpipe.core.schedule import ORDERS, Lockstep, lower
from jaxpipe.core.split.split import split_layer

WIDE = 4  # examples per microbatch


def while_body(text):
    """Return the text of the computation that is the body of the tick loop."""
    (name,) = set(re.findall(r"while\(.*?body=%?([\w.\-]+)", text))
    start = re.search(rf"^%?{re.escape(name)} .*{{$", text, re.M)
    return text[start.start() : text.index("\n}", start.start())]


@pytest.mark.extended(only=["dualpipev-4-8-2"])
@pytest.mark.slow(unless=["zbv-4-8-2", "dualpipev-4-8-2"])
@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "transfer_ticks"),
    [("1f1b", 2, 4, 1), ("1f1b", 4, 16, 1), ("1f1b", 8, 8, 2), ("dualpipe", 4, 8, 1)]
    + [(name, 4, 8, 2) for name in ("interleaved_zb", "zb_h1", "zbv", "dualpipe", "dualpipev")],
)
def test_two_permutes_a_tick(name, pp, microbatches, transfer_ticks):
    """One in each direction of the ring, however many messages they carry."""
    text = compiled(name, pp, microbatches, lockstep=Lockstep(transfer_ticks)).as_text()
    assert len(re.findall(r"= .*collective-permute(?:-start)?\(", while_body(text))) == 2


def copies_in_the_loop(compiled_step, sizes, shape):
    """Return copies, outside the entry, of ring buffers with these slot counts and slot shape."""
    text = compiled_step.as_text()
    loop = text.replace(text[text.index("ENTRY") :], "")
    sizes = "|".join(map(str, sizes))
    slot = ",".join(map(str, shape))
    return re.findall(rf"\w+\[(?:{sizes}),{slot},[\d,]+\]\S* copy\(", loop)


@pytest.mark.extended(unless=["zbv"])
@pytest.mark.slow(unless=["interleaved_zb", "zbv", "dualpipev"])
@pytest.mark.parametrize("name", ORDERS)
def test_no_ring_is_copied_in_the_loop(name):
    trace, schedule = traced(name, 4, 8)
    tables = lower(schedule)
    # Every message, residual and W stash of the toy layer is [examples, length, ...].
    _, (layer, *_) = toy_params(0, 1)
    microbatch = jax.tree.map(lambda a: a[0], toy_batch(1, 1, WIDE))
    split = split_layer(KIND.layer, layer, jnp.zeros((WIDE, 6, 8)), Context(microbatch))
    uses, _ = values_by_use(split.residuals, split.stash, separate=False)
    lengths = ring_lengths(uses, tables.rank_slots)
    sizes = {tables.slots.inbox + 1, *lengths.values()} - {0}
    assert not copies_in_the_loop(trace.lower().compile(), sizes, (WIDE, 6))


def test_a_ring_that_is_copied_is_seen():
    """Two buffers that swap places in every tick cannot be written in place."""
    ring = jnp.zeros((3, WIDE, 6, 8))

    def tick(carry, i):
        one, other = carry
        return (other.at[i % 3].add(1.0), one.at[i % 3].multiply(2.0)), other[0, 0, 0, 0]

    step = jax.jit(lambda one, other: jax.lax.scan(tick, (one, other), jnp.arange(5)))
    assert copies_in_the_loop(step.lower(ring, ring + 1).compile(), {3}, (WIDE, 6))


@pytest.mark.extended
def test_size_does_not_grow_with_microbatches():
    lines = {
        microbatches: len(compiled("1f1b", 4, microbatches).as_text().splitlines())
        for microbatches in (4, 64)
    }
    assert lines[64] <= 1.02 * lines[4]


@pytest.mark.slow(
    unless=[
        "none-0-False-zb_h1",
        "none-0-True-1f1b",
        "none-0-True-zbv",
        "full-1-False-interleaved_zb",
        "full-1-False-dualpipev",
    ]
)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("remat", "extra", "defer_embed_head"),
    [("none", 0, False), ("none", 0, True), ("full", 1, False)],
)
def test_no_wasted_flops(name, remat, extra, defer_embed_head):
    pp, microbatches = 4, 8
    lockstep = Lockstep(defer_embed_head=defer_embed_head)
    trace, schedule = traced(name, pp, microbatches, lockstep=lockstep, remat=remat)
    tables = lower(schedule, lockstep)
    shared, layers = toy_params(0, schedule.stages * LAYERS_EACH)
    microbatch = jax.tree.map(lambda a: a[0], toy_batch(1, microbatches, WIDE))

    def loss(params):
        x = TOY.embed(params["embed_head"], microbatch)
        for layer in params["layers"]:
            x = KIND.layer(layer, x, Context(microbatch)).y
        return TOY.head(params["embed_head"], x, microbatch)

    params = {"embed_head": shared, "layers": layers}
    reference = dot_flops(jax.make_jaxpr(jax.grad(loss))(params).jaxpr, None) * microbatches
    x = jnp.zeros((WIDE, 6, 8))
    forward = jax.make_jaxpr(lambda p, x: KIND.layer(p, x, Context(microbatch)).y)(layers[0], x)
    # A recomputed layer repeats its products once, without the last one, which no gradient reads.
    down = 2 * WIDE * 6 * 16 * 8
    repeated = dot_flops(forward.jaxpr, None) - down
    want = reference + extra * repeated * len(layers) * microbatches
    got = sum(executed_flops(trace, tables, rank) for rank in range(pp))
    assert got == want
