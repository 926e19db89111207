"""What XLA is given and makes of it: permutes, copies, size, time and FLOPs of the step."""

import re
import time

import jax
import jax.numpy as jnp
import pytest
from meshes import EXAMPLES, LENGTH, pipeline_of
from programs import LAYERS_EACH, compiled, dot_flops, executed_flops, traced
from toy import KIND, TOY, toy_batch, toy_params

from jaxpipe.pipeline import Context
from jaxpipe.schedule import BUILDERS, Lockstep, lower

WIDE = 4  # examples per microbatch


def while_body(text):
    """The text of the computation that is the tick loop's body."""
    (name,) = set(re.findall(r"while\(.*?body=%?([\w.\-]+)", text))
    start = re.search(rf"^%?{re.escape(name)} .*{{$", text, re.M)
    return text[start.start() : text.index("\n}", start.start())]


@pytest.mark.parametrize("transfer_ticks", [1, 2])
@pytest.mark.parametrize(
    ("name", "pp", "microbatches"),
    [("1f1b", 2, 4), ("1f1b", 4, 16), ("1f1b", 8, 8)]
    + [(name, 4, 8) for name in ("interleaved_zb", "zb_h1", "zbv", "dualpipe", "dualpipev")],
)
def test_two_permutes_a_tick(name, pp, microbatches, transfer_ticks):
    """One each way round the ring, however many messages they carry."""
    text = compiled(name, pp, microbatches, lockstep=Lockstep(transfer_ticks)).as_text()
    assert len(re.findall(r"= .*collective-permute(?:-start)?\(", while_body(text))) == 2


@pytest.mark.parametrize("name", BUILDERS)
def test_no_ring_is_copied_in_the_loop(name):
    trace, schedule = traced(name, 4, 8)
    slots = lower(schedule).slots
    text = trace.lower().compile().as_text()
    loop = text.replace(text[text.index("ENTRY") :], "")
    # Every message, residual and stash of the toy layer is [examples, length, ...].
    sizes = "|".join(map(str, {slots.inbox + 1, *slots[1:]} - {0}))
    assert not set(re.findall(rf"\w+\[(?:{sizes}),{WIDE},6,[\d,]+\]\S* copy\(", loop))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_no_ring_of_slices_is_copied_in_the_loop(schedule):
    """Keys and values, and the gradient at them, are written into their slots in place."""
    pipeline, _, params, batch = pipeline_of("normed", schedule, 2, 1, 1, slices=4)
    slots = pipeline.tables.slots
    step = jax.jit(pipeline.losses_and_gradients).lower(params, batch)
    text = step.compile().as_text()
    loop = text.replace(text[text.index("ENTRY") :], "")
    one = ",".join(map(str, (EXAMPLES, LENGTH, 4, 16)))
    assert f"f32[{slots.state},{one}]" in loop
    assert not re.findall(rf"\w+\[(?:{slots.state}|{slots.dstate}),{one}\]\S* copy\(", loop)


def test_size_and_compile_time_do_not_grow_with_microbatches():
    """Other sizes in every round: a program that was compiled before would come from a cache."""
    lines, seconds = {}, {4: [], 64: []}
    for examples in (4, 5, 6):
        for microbatches in seconds:
            trace, _ = traced("1f1b", 4, microbatches, examples=examples)
            start = time.perf_counter()
            text = trace.lower().compile().as_text()
            seconds[microbatches].append(time.perf_counter() - start)
            lines[microbatches] = len(text.splitlines())
    assert lines[64] <= 1.02 * lines[4]
    assert 0.05 < min(seconds[64]) <= 1.5 * min(seconds[4])


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("remat", "extra", "defer_ends"), [("none", 0, False), ("none", 0, True), ("full", 1, False)]
)
def test_no_wasted_flops(name, remat, extra, defer_ends):
    pp, microbatches = 4, 8
    lockstep = Lockstep(defer_ends=defer_ends)
    trace, schedule = traced(name, pp, microbatches, lockstep=lockstep, remat=remat)
    tables = lower(schedule, lockstep)
    shared, layers = toy_params(jax.random.key(0), schedule.stages * LAYERS_EACH)
    microbatch = jax.tree.map(lambda a: a[0], toy_batch(jax.random.key(1), microbatches, WIDE))

    def loss(params):
        x = TOY.embed(params["shared"], microbatch)
        for layer in params["layers"]:
            x = KIND.layer(layer, x, Context(microbatch)).y
        return TOY.head(params["shared"], x, microbatch)

    params = {"shared": shared, "layers": layers}
    reference = dot_flops(jax.make_jaxpr(jax.grad(loss))(params).jaxpr, None) * microbatches
    x = jnp.zeros((WIDE, 6, 8))
    forward = jax.make_jaxpr(lambda p, x: KIND.layer(p, x, Context(microbatch)).y)(layers[0], x)
    # A recomputed layer repeats its products once, less the last one, which no gradient reads.
    down = 2 * WIDE * 6 * 16 * 8
    repeated = dot_flops(forward.jaxpr, None) - down
    want = reference + extra * repeated * len(layers) * microbatches
    got = sum(executed_flops(trace, tables, rank) for rank in range(pp))
    assert got == want
