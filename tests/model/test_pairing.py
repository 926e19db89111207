"""`LayerKind.pair` changes the order in which an F and a gradient of one cell run, nothing else."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from orders import near
from programs import find_scan
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.contract import Context, LayerKind, LayerOutput
from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import Lockstep
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.core.split.jaxpr import dependents
from jaxpipe.core.split.split import Cotangent
from jaxpipe.model.layers.pairing import in_rounds, pairing_point, run_in_rounds

PAIRED = Lockstep(transfer_ticks=1, pairs=True)


def layer(params, x, context, *, named=True):
    mark = pairing_point if named else lambda value, name: value
    positions = context.rows["positions"]
    scaled = x * params["gain"][None, None] / jnp.sqrt(1 + jnp.mean(x * x, axis=-1, keepdims=True))
    mixed = mark(jnp.cumsum(scaled, axis=1) / (1 + positions[..., None].astype(x.dtype)), "mixed")
    hidden = mark(jax.nn.silu(mixed @ params["up"]) * (scaled @ params["gate"]), "hidden")
    return LayerOutput(x + hidden @ params["down"])


class Recorded:
    """A hook that records its arguments."""

    def __init__(self, *rounds):
        self.rounds, self.given = rounds, []

    def __call__(self, forward, gradient):
        self.given.append((forward, gradient))
        return self.rounds


def abreast():
    return Recorded(("mixed", "hidden"), ("hidden", None), (None, "mixed"))


def pipeline_of(name, counts, hook, pp=2, **execution):
    """Return the pipeline and the inputs of its step."""
    schedule = near(name, pp, 2 * pp, virtual_stages=2)
    model = replace(TOY, kinds=LayerKind(layer, pair=hook and in_rounds(hook)))
    layout = StageLayout(tuple(counts(schedule.stages)), schedule.placement)
    shared, layers = toy_params(0, layout.layers, jnp.float64)
    batch = toy_batch(1, schedule.microbatches, 2)
    mesh = make_mesh(pp, devices=jax.devices()[:pp])
    how = Execution(PAIRED, **execution)
    pipeline = Pipeline(model, schedule, mesh, layout.layers_per_stage, how)
    want = partial(losses_and_gradients_ref, model, shared, layers, batch)
    return pipeline, ({"embed_head": shared, "layers": layout.stack(layers)}, batch), layout, want


def two(stages):
    return [2] * stages


def uneven(stages):
    """Return one layer per stage in the first half of the V, two in the second."""
    return [1 + (stage >= stages // 2) for stage in range(stages)]


@pytest.mark.slow(only=["dualpipe-two-none"])
@pytest.mark.parametrize(
    ("name", "counts", "remat"),
    [("dualpipe", two, "none"), ("dualpipev", two, "full"), ("dualpipev", uneven, "selective")],
)
def test_a_step_in_rounds_equals_the_reference(name, counts, remat):
    """Results differ in rounding from those without rounds: XLA fuses differently at a barrier."""
    with jax.enable_x64(True):
        hook = abreast()
        pipeline, given, layout, want = pipeline_of(
            name, counts, hook, remat=remat, poison_bubbles=True
        )
        got = jax.jit(pipeline.losses_and_gradients)(*given)
        losses, gradients = want()
        assert_same(got, (losses, gradients | {"layers": layout.stack(gradients["layers"])}))
    assert hook.given
    assert set(hook.given) == {(("mixed", "hidden"), ("hidden", "mixed"))}


def branches(name, counts, hook):
    """Return the equations of each branch of the loop that has both an F and a gradient."""
    with jax.enable_x64(True):
        pipeline, given, *_ = pipeline_of(name, counts, hook)
        trace = jax.jit(pipeline.losses_and_gradients).trace(*given)
    body = find_scan(trace.jaxpr.jaxpr).params["jaxpr"].jaxpr
    conds = [eqn for eqn in body.eqns if eqn.primitive.name == "cond"]
    pairs = conds[: len(pipeline.tables.pairs)]
    return [max((b.jaxpr for b in eqn.params["branches"]), key=lambda j: len(j.eqns))
            for eqn in pairs]  # fmt: skip


def barriers(jaxpr):
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in jaxpr.eqns)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_every_pair_of_layers_runs_in_rounds(name):
    """Two layers of F with two of the gradient: three rounds each, then the rest of both."""
    plain, hooked = (branches(name, two, hook) for hook in (None, abreast()))
    assert plain
    for before, after in zip(plain, hooked, strict=True):
        assert barriers(after) == barriers(before) + 2 * (3 + 1)


def test_layers_of_the_longer_one_follow_alone():
    """Stages of one and two layers meet in the middle of the V; the second layer runs alone."""
    hook = abreast()
    plain, hooked = (branches("dualpipev", uneven, how) for how in (None, hook))
    assert len(hook.given) < 2 * len(plain)
    assert all(barriers(after) > barriers(before) for before, after in zip(plain, hooked))


def halves(a, b):
    """Return F of one function and the gradient of another, each with one pairing point."""

    def function(x):
        return jnp.cos(pairing_point(jnp.sin(x), "one"))

    return (function, a), (lambda dy: jax.vjp(function, 3.0)[1](dy)[0], b)


@pytest.mark.parametrize(
    ("rounds", "waits"),
    [((), False), ([("one", "one")], True), ([("one", None)], True), ([(None, "one")], True)],
)
def test_what_waits_for_what(rounds, waits):
    """The end of either function waits for what both have run in earlier rounds."""
    made = jax.make_jaxpr(lambda a, b: run_in_rounds(*halves(a, b), Recorded(*rounds)))(
        1.0, 2.0
    ).jaxpr
    of_a, of_b = (dependents(made, {given}) for given in made.invars)
    ahead, back = made.outvars
    assert (ahead in of_b, back in of_a) == (waits, waits)


def test_what_runs_in_one_round_does_not_wait():
    run = lambda a, b: run_in_rounds(*halves(a, b), Recorded(("one", "one")))  # noqa: E731
    made = jax.make_jaxpr(run)(1.0, 2.0).jaxpr
    of_a, of_b = (dependents(made, {given}) for given in made.invars)
    named = [eqn.outvars[0] for eqn in made.eqns if eqn.primitive.name == "name"]
    assert {(var in of_a, var in of_b) for var in named} == {
        (True, False), (False, True), (False, False),  # the last is what the gradient recomputes
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "left"),
    [([("two", None)], "'two', which is not ahead: left are 'one'"),
     ([("one", None), ("one", None)], "'one', which is not ahead: left are none"),
     ([(None, "two")], "'two', which is not ahead: left are 'one'")],
)  # fmt: skip
def test_points_that_are_not_ahead(rounds, left):
    with pytest.raises(ValueError, match=left):
        run_in_rounds(*halves(1.0, 2.0), Recorded(*rounds))


def test_a_half_without_points_is_not_divided():
    forward, _ = halves(1.0, 2.0)
    hook = Recorded(("one", "one"))
    assert run_in_rounds(forward, (jnp.sin, 2.0), hook)[1] == jnp.sin(2.0)
    assert not hook.given


def one_layer(remat, *, named=True):
    """Return the split layer, and its parameters, x and context."""
    shared, (params,) = toy_params(0, 1)
    rows = jax.tree.map(lambda leaf: leaf[0], toy_batch(1, 1, 2))
    given = params, TOY.embed(shared, rows), Context(rows)
    return split_layer(partial(layer, named=named), *given, POLICIES[remat]), given


@pytest.mark.parametrize("remat", ["none", "full"])
def test_rounds_change_no_bit(remat):
    """With operations that run one by one, which nothing fuses."""
    split, (params, x, context) = one_layer(remat)
    _, kept = split.forward(params, x, context)

    def forward(x):
        return split.forward(params, 2 * x, context)

    def gradient(dy):
        return split.backward(params, context, kept, Cotangent(dy))

    hook = abreast()
    got = run_in_rounds((forward, x), (gradient, x), hook)
    assert hook.given == [(("mixed", "hidden"), ("hidden", "mixed"))]
    jax.tree.map(np.testing.assert_array_equal, got, [forward(x), gradient(x)])


@pytest.mark.parametrize("remat", POLICIES)
def test_points_store_nothing(remat):
    kept = [one_layer(remat, named=named)[0] for named in (False, True)]
    shapes = [sorted(leaf.shape for leaf in (*s.residuals.for_b, *s.residuals.for_w, *s.stash))
              for s in kept]  # fmt: skip
    assert shapes[0] == shapes[1]
