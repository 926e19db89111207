"""Auxiliary losses of a layer are means, whose terms are counted by the rows alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orders import build
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.contract import Aux, LayerKind, LayerOutput
from jaxpipe.core.executor import Pipeline, step_ref
from jaxpipe.core.mesh import make_mesh


def toy(losses):
    """The toy with one more output of its layers."""

    def layer(params, x, context):
        return TOY.kinds.layer(params, x, context)._replace(aux=Aux(losses(x, context)))

    return replace(TOY, kinds=LayerKind(layer, TOY.kinds.param_specs))


def run_toy(functions, batch, shared, layers, forward=False):
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(functions, build("1f1b", pp=2, microbatches=2), mesh, (1, 1))
    params = {"embed_head": shared, "layers": pipeline.layout(1).stack(layers)}
    return jax.jit(pipeline.forward if forward else pipeline.step)(params, batch)


@pytest.mark.parametrize("forward", [False, True])
def test_a_count_may_be_inside_a_rematerialised_layer(forward):
    """Only what it needs is computed, so that it depends on the rows alone."""
    batch, (shared, layers) = toy_batch(0, 2, 1), toy_params(0, 2)
    even = lambda context: (context.rows["inputs"] % 2 == 0).astype(jnp.int32)  # noqa: E731

    @jax.checkpoint
    def losses(x, context):
        chosen = even(context)
        mean = {"even": (jnp.sum(x[..., 0] * chosen), chosen.sum())}
        return mean | {"none": (jnp.sum(x), chosen.sum() * 0)}

    got = run_toy(toy(losses), batch, shared, layers, forward)
    want = step_ref(toy(losses), shared, layers, batch)
    np.testing.assert_allclose(got.aux_losses, want.aux_losses, rtol=1e-5)
    if not forward:
        found, wanted = (made.gradients["embed_head"]["embed"] for made in (got, want))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)


def test_a_count_of_the_activations_is_refused():
    batch, (shared, layers) = toy_batch(0, 2, 1), toy_params(0, 2)
    functions = toy(lambda x, context: {"few": (jnp.sum(x), jnp.sum(x > 0))})
    with pytest.raises(ValueError, match="'layer' count the terms of an auxiliary loss .few. by"):
        run_toy(functions, batch, shared, layers)
    assert LayerOutput(0).aux.losses == {}
