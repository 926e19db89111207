"""Prints and callbacks of a layer run as often as the layer: once in F, once in the gradient."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from orders import build
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.split import POLICIES

LAYERS, MICROBATCHES = 4, 4


def seen_in(functions, schedule="1f1b", policy="none", trains=True):
    """Return how often a step calls `note`, by the first argument of `note`."""
    shared, layers = toy_params(0, LAYERS)
    built = build(schedule, pp=2, microbatches=MICROBATCHES)
    layout = StageLayout((LAYERS // built.stages,) * built.stages, built.placement)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    batch = toy_batch(1, MICROBATCHES, 2)
    mesh = make_mesh(2, devices=jax.devices()[:2])
    how = Execution(remat=policy)
    pipeline = Pipeline(functions, built, mesh, layout.layers_per_stage, how)
    SEEN.clear()
    step = pipeline.losses_and_gradients if trains else pipeline.losses
    jax.block_until_ready(jax.jit(step)(params, batch))
    jax.effects_barrier()
    return Counter(SEEN)


SEEN = []


def note(what, value):
    assert np.isfinite(value).all()
    SEEN.append(int(what))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def noted_in_gradient(x, what):
    return x


def _noted(what, _, dx):
    jax.debug.callback(note, what, dx)
    return (dx,)


noted_in_gradient.defvjp(lambda x, what: (x, None), _noted)


def layer(params, x, context):
    jax.debug.callback(note, context.index, x)
    y = TOY.kinds.layer(params, x, context).y
    return LayerOutput(noted_in_gradient(y, 100))


TELLING = StageFunctions(TOY.embed, LayerKind(layer), TOY.head, TOY.count)


@pytest.mark.extended(only=["dualpipev-none", "zb_h1-selective"])
@pytest.mark.slow(unless=["1f1b-full", "zb_h1-selective", "dualpipev-none"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipev"])
def test_effects_of_layers(schedule, policy):
    want = {index: MICROBATCHES for index in range(LAYERS)} | {100: LAYERS * MICROBATCHES}
    assert seen_in(TELLING, schedule, policy) == want


def test_effects_of_a_forward_pass():
    assert seen_in(TELLING, trains=False) == {index: MICROBATCHES for index in range(LAYERS)}


@pytest.mark.extended(only=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_effects_of_embedding_and_head(schedule):
    def embed(shared, rows):
        jax.debug.callback(note, 1, shared["embed"])
        return TOY.embed(shared, rows)

    def head(shared, x, rows):
        jax.debug.callback(note, 2, x)
        return TOY.head(shared, noted_in_gradient(x, 3), rows)

    functions = StageFunctions(embed, TOY.kinds, head, TOY.count)
    assert seen_in(functions, schedule) == dict.fromkeys((1, 2, 3), MICROBATCHES)


@pytest.mark.extended(only=["none"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_what_a_callback_returns_is_stored(policy):
    """A callback is not repeated in the gradient, whatever is rematerialized."""

    def factor(index):
        SEEN.append(int(index))
        return np.float32(1.5)

    def layer(params, x, context):
        scale = io_callback(factor, jax.ShapeDtypeStruct((), jnp.float32), context.index)
        return LayerOutput(jnp.tanh(scale * x) + x @ params["up"] @ params["down"])

    functions = StageFunctions(TOY.embed, LayerKind(layer), TOY.head, TOY.count)
    assert seen_in(functions, "zb_h1", policy) == dict.fromkeys(range(LAYERS), MICROBATCHES)


def test_effects_in_a_loop():
    """The effects of an opaque equation are those of its body."""

    def layer(params, x, context):
        def turn(x, _):
            jax.debug.callback(note, context.index, x)
            return jnp.tanh(x), None

        turned, _ = jax.lax.scan(turn, x, None, length=3)
        return LayerOutput(turned + x @ params["up"] @ params["down"])

    functions = StageFunctions(TOY.embed, LayerKind(layer), TOY.head, TOY.count)
    want = dict.fromkeys(range(LAYERS), 3 * MICROBATCHES)
    assert seen_in(functions, "zb_h1", "full") == want
