"""Layers that the pipeline cannot run are refused with one sentence, before anything compiles."""

import jax
import jax.numpy as jnp
import pytest
from orders import build
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.contract import Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.executor import Pipeline
from jaxpipe.core.executor.traced_kind import TracedKind
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.split import POLICIES


def step(layer=None, losses=("loss",), **more):
    """Run one step on two ranks, with the toy's or another layer, and `more` keys in the batch."""
    kind = TOY.kinds if layer is None else LayerKind(layer)
    reads = ("inputs", "targets", "positions")
    functions = StageFunctions(
        TOY.embed, kind, TOY.head, TOY.count, batch_keys=reads, losses=losses
    )
    shared, layers = toy_params(0, 2)
    params = {"embed_head": shared, "layers": StageLayout((1, 1)).stack(layers)}
    batch = toy_batch(1, 2, 2)
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


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("tree", [lambda x: {"a": x}, lambda x: (x, x)], ids=["dict", "tuple"])
def test_trees_between_layers(tree, forward):
    """Where the embedding makes one, and where a layer does."""
    shared, layers = toy_params(0, 2)
    params = {"embed_head": shared, "layers": StageLayout((1, 1)).stack(layers)}
    mesh, schedule = make_mesh(2, devices=jax.devices()[:2]), build("1f1b", pp=2, microbatches=2)
    for embed, layer, name in (
        (lambda *given: tree(TOY.embed(*given)), TOY.kinds.layer, "x"),
        (TOY.embed, toy_layer(tree), "y"),
    ):
        functions = StageFunctions(embed, LayerKind(layer), TOY.head, TOY.count)
        pipeline = Pipeline(functions, schedule, mesh)
        run = pipeline.forward if forward else pipeline.step
        with pytest.raises(ValueError, match=f"^{name} of .* is a (dict|tuple) of . arrays"):
            jax.eval_shape(run, params, toy_batch(1, 2, 2))


def test_a_leaf_of_the_batch_that_no_function_reads():
    message = "the batch has a leaf 'segments' that the model does not read: leave it out"
    with pytest.raises(ValueError, match=message):
        step(segments="inputs")


def test_losses_that_are_named_and_not_made():
    message = r"the head returns losses of shape \(\), but `losses` names loss, more: return a"
    with pytest.raises(ValueError, match=message):
        step(losses=("loss", "more"))


def test_a_state_that_is_unlike_the_one_that_was_given():
    def layer(params, x, context):
        return LayerOutput(x * params, context.state[:, :3])

    kind = LayerKind(layer, state=lambda x, rows: jnp.zeros((2, 6)))
    x = jax.ShapeDtypeStruct((2, 6), "float32")
    context = Context({}, jax.ShapeDtypeStruct((), "int32"))
    message = (
        r"the state that it returns as float32\[2, 3\] where the one it is given is float32\[2"
    )
    with pytest.raises(ValueError, match=message):
        TracedKind.trace("layer", kind, x, x, context, POLICIES["none"])
