"""What the pipeline cannot run is refused in a sentence, before anything is compiled."""

import jax
import jax.numpy as jnp
import pytest
from toy import TOY, toy_batch, toy_params

from jaxpipe.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.parallel import StageLayout, make_mesh
from jaxpipe.pipeline import Pipeline
from jaxpipe.schedule import build


def step(layer=None, **more):
    """One step of two ranks, of the toy or with another layer, and more leaves in the batch."""
    kind = TOY.kinds if layer is None else LayerKind(layer)
    reads = ("inputs", "targets", "positions")
    functions = StageFunctions(TOY.embed, kind, TOY.head, TOY.count, reads=reads)
    shared, layers = toy_params(jax.random.key(0), 2)
    params = {"shared": shared, "layers": StageLayout((1, 1)).stack(layers)}
    batch = toy_batch(jax.random.key(1), 2, 2)
    batch |= {name: batch[of] for name, of in more.items()}
    mesh = make_mesh(2, devices=jax.devices()[:2])
    pipeline = Pipeline(functions, build("1f1b", pp=2, microbatches=2), mesh)
    return jax.eval_shape(pipeline.losses_and_gradients, params, batch)


def toy_layer(change):
    return lambda params, x, context: LayerOutput(change(TOY.kinds.layer(params, x, context).y))


def test_the_toy_is_not_refused():
    losses, _ = step()
    assert losses.shape == (2,)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda y: y[..., :4], r"float32\[2, 6, 4\]"),
        (lambda y: y.astype(jnp.bfloat16), r"bfloat16\[2, 6, 8\]"),
    ],
    ids=["shape", "dtype"],
)
def test_a_layer_whose_output_is_unlike_its_input(change, got):
    message = rf"layers of kind 'layer' make y as {got} where x is float32\[2, 6, 8\].*make both"
    with pytest.raises(ValueError, match=message):
        step(toy_layer(change))


def test_a_leaf_of_the_batch_that_no_function_reads():
    message = "the batch has a leaf 'segments' that the model does not read: leave it out"
    with pytest.raises(ValueError, match=message):
        step(segments="inputs")
