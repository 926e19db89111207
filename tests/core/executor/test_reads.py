"""Layers that read embedding and head (`LayerKind.reads`), against one device.

One reading layer is in the middle of the model and one at its end. The toy's look tokens up in the
embedding, and make a loss with the head, as a module of multi-token prediction does. Layers of the
decoder call the decoder's own embedding and head, which tensor-parallel devices share.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from orders import build, near
from toy import KIND, TOY, WIDTH, toy_batch, toy_params

from jaxpipe.core.contract import Aux, Context, LayerKind, LayerOutput, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.executor.traced_kind import TracedKind
from jaxpipe.core.mesh import PP, StageLayout, make_mesh
from jaxpipe.core.mesh.flags import is_trained
from jaxpipe.core.schedule import ORDERS, Lockstep
from jaxpipe.core.split.crossing import POLICIES
from jaxpipe.core.split.ports import Cotangent

READS = ("embed_head",)
ORDER = ("toy", "toy", "toy", "looks", "toy", "toy", "toy", "scores")


def looks(params, x, context):
    """Add what a matrix makes of the token's entry in the embedding, which has a gain."""
    shared = context.embed_head
    entry = shared["embed"][context.rows["inputs"]] * shared["norm"][None, None]
    return LayerOutput(x + jnp.tanh((x + entry) @ params["up"]) @ params["down"])


def scores(params, x, context):
    """Make a loss of all logits, like a module of multi-token prediction."""
    y = x + jnp.tanh(x @ params["up"]) @ params["down"]
    shared = context.embed_head
    head = shared["embed"].T if "head" not in shared else shared["head"]
    logits = (y * shared["norm"][None, None]) @ head
    loss = 0.1 * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return LayerOutput(y, aux=Aux({"z": (loss, logits[..., 0].size)}))


def toy(**specs):
    kinds = {"toy": KIND, "looks": LayerKind(looks, reads=READS)}
    kinds["scores"] = LayerKind(scores, reads=READS)
    return replace(TOY, kinds=kinds, order=ORDER, **specs)


def tied():
    def head(shared, x, rows):
        return TOY.head({**shared, "head": shared["embed"].T}, x, rows)

    return replace(toy(), head=head)


def toy_pipeline(functions, schedule, dp, dtype, **execution):
    """Return a pipeline of the toy, its layout, parameters (staged, and by layer), and batch."""
    order = functions.order
    each = (len(order) // schedule.stages,) * schedule.stages
    layout = StageLayout(each, schedule.placement, order)
    shared, layers = toy_params(0, len(order), dtype)
    if functions.head is not TOY.head:
        del shared["head"]
    mesh = make_mesh(schedule.pp, dp, devices=jax.devices()[: schedule.pp * dp])
    pipeline = Pipeline(functions, schedule, mesh, each, Execution(**execution))
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    return pipeline, layout, params, layers, toy_batch(1, schedule.microbatches, 2 * dp)


def check_toy(functions, schedule, dp=2, **execution):
    with jax.enable_x64(True):
        pipeline, layout, params, layers, batch = toy_pipeline(
            functions, schedule, dp, float, **execution
        )
        got = jax.jit(pipeline.step)(params, batch)
        want = step_ref(functions, params["embed_head"], layers, batch)
        staged = want.gradients | {"layers": layout.stack(want.gradients["layers"])}
        assert_same(got, want._replace(gradients=staged))
        forward = jax.jit(pipeline.forward)(params, batch)
        assert_same(forward.losses, want.losses)
        return got


@pytest.mark.extended(unless=["1f1b"])
@pytest.mark.slow(unless=["1f1b", "zbv"])
@pytest.mark.parametrize("name", ORDERS)
def test_under_every_schedule(name):
    check_toy(toy(), near(name, 2, 1), poison_bubbles=True)


@pytest.mark.extended
@pytest.mark.slow(unless=["tied-3-True"])
@pytest.mark.parametrize(("stage", "reshard"), [(0, False), (1, False), (3, True)])
@pytest.mark.parametrize("functions", [toy(), tied()], ids=["apart", "tied"])
def test_on_four_ranks_however_they_are_stored(functions, stage, reshard):
    how = {"zero_stage": stage, "reshard_after_forward": reshard}
    lockstep = Lockstep(defer_embed_head=True)
    check_toy(functions, build("zb_h1", pp=4, microbatches=5), **how, lockstep=lockstep)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_in_a_closing_tick(name):
    check_toy(toy(), build(name, pp=2, microbatches=4), overlap_sums=True, remat="full")


@pytest.mark.extended
@pytest.mark.parametrize("shared", [False, True])
def test_the_closing_tick_copies_no_sums(shared, monkeypatch):
    """Each layer is on one rank alone, in a cond that adds to the sums of embedding and head."""
    monkeypatch.setattr("toy.VOCAB", vocabulary := 4096)  # XLA lays small arrays out anew
    functions = replace(toy(), order=("looks", "scores"))
    schedule, lockstep = build("1f1b", pp=2, microbatches=2), Lockstep(vocab_parallel=shared)

    def copies(**how):
        pipeline, _, params, _, batch = toy_pipeline(
            functions, schedule, 2, "float32", lockstep=lockstep, **how
        )
        step = jax.jit(pipeline.step).lower(params, batch).compile()
        of_sums = rf"= f32\[({vocabulary},{WIDTH}|{WIDTH},{vocabulary})\]\S* (copy|select)\("
        return len(re.findall(of_sums, step.as_text()))

    assert copies(overlap_sums=True) == copies()


@pytest.mark.slow
def test_a_frozen_embedding_is_read():
    spec = {name: ParamSpec(partial_grad_axes=(PP,)) for name in ("norm", "head")}
    frozen = spec | {"embed": ParamSpec(partial_grad_axes=(PP,), trained=False)}
    got = check_toy(toy(embed_head_specs=frozen), build("zb_h1", pp=2, microbatches=4))
    assert got.gradients["embed_head"]["embed"] is None


def test_their_matrices_gradients_are_in_w():
    """B has the products of the gradient at x alone, and the gradients of vectors."""
    shared, (params,) = toy_params(0, 1)
    rows = jax.tree.map(lambda a: a[0], toy_batch(1, 1, 3))
    x, context = jnp.ones((3, 6, WIDTH)), Context(rows, embed_head=shared)
    trained = is_trained({name: ParamSpec() for name in shared})
    kind = LayerKind(scores, reads=READS)
    traced = TracedKind.trace("scores", kind, params, x, context, POLICIES["none"], trained)
    split = traced.split
    assert split.uses_of_embed_head == {"embed": False, "norm": True, "head": True}
    _, kept = split.forward(params, x, context)
    dy = Cotangent(x, losses=dict.fromkeys(split.output.aux.losses, jnp.float32(1)))
    _, of_b, stash = split.backward_input(params, context, kept, dy)
    of_w = split.backward_weight(params, context, kept.for_w, stash, dy.losses)
    assert {name for name, g in of_b.embed_head.items() if g is not None} == {"norm"}
    assert {name for name, g in of_w.embed_head.items() if g is not None} == {"head"}


def test_nothing_else_can_be_read():
    with pytest.raises(ValueError, match=r"LayerKind.reads=\('layers',\): a layer can read"):
        LayerKind(looks, reads=("layers",))
    with pytest.raises(ValueError, match="reads"):
        StageFunctions(TOY.embed, LayerKind(looks, reads=["embed_head", ""]), TOY.head, TOY.count)
