"""A recurrent state in sequence slices: what a layer received is what its backward reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule.orders import ORDERS

LAYERS, WIDTH, MICROBATCHES, SLICES, ROWS = 4, 5, 4, 3, 2


def layer(params, x, context):
    """Let the state forget: gradients read x, the state that was received, and the new one."""
    state = context.state if context.state is not None else jnp.zeros_like(x)
    after = jnp.tanh(0.5 * state + x @ params["enters"]) * state + x
    return LayerOutput(x + (state * x) @ params["leaves"] + jnp.sin(after), after)


def model(*, recurrent=True):
    kind = LayerKind(layer, state=lambda x, rows: jnp.zeros_like(x), recurrent=recurrent)
    return StageFunctions(
        lambda shared, rows: rows["x"] * shared["scale"][None], kind,
        lambda shared, x, rows: (x**2).sum(), lambda rows: rows["x"].size,
    )  # fmt: skip


def problem():
    rng = np.random.default_rng(0)
    size = (WIDTH, WIDTH)
    layers = [
        {name: 0.3 * rng.normal(size=size) for name in ("enters", "leaves")} for _ in range(LAYERS)
    ]
    x = rng.normal(size=(MICROBATCHES * SLICES, ROWS, WIDTH))
    return {"scale": rng.normal(size=WIDTH)}, layers, {"x": x}


def step(schedule, *, recurrent=True, **execution):
    more = {"virtual_stages": 2} if schedule == "interleaved_zb" else {}
    built = ORDERS[schedule](pp=2, microbatches=MICROBATCHES, slices=SLICES, **more)
    layout = StageLayout((LAYERS // built.stages,) * built.stages, built.placement)
    shared, layers, batch = problem()
    pipeline = Pipeline(
        model(recurrent=recurrent), built, make_mesh(2, devices=jax.devices()[:2]),
        layout.layers_per_stage,
        Execution(**execution),
    )  # fmt: skip
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    got = jax.jit(pipeline.step)(params, batch)
    gradients = {**got.gradients, "layers": layout.unstack(got.gradients["layers"])}
    return got.losses, gradients


@pytest.mark.extended(unless=["1f1b-full", "zb_h1-none"])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_zb"])
def test_it_is_exact_under_every_rematerialisation(schedule, remat):
    with jax.enable_x64(True):
        want = step_ref(model(), *problem(), slices=SLICES)
        got = step(schedule, remat=remat, poison_bubbles=True)
        assert_same(got, (want.losses, want.gradients))


def test_without_saying_so_it_is_refused():
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="not the state that it is given"),
    ):
        step("1f1b", recurrent=False)
