"""Frozen parameters (`ParamSpec.trained`): no gradient, no W, no sum, under any schedule."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from orders import build, near
from programs import dot_flops, find_scan
from toy import KIND, TOY, VOCAB, WIDTH, toy_batch, toy_params

from jaxpipe.core.contract import Context, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.executor import Execution, Pipeline, step_ref
from jaxpipe.core.executor.traced_kind import TracedKind
from jaxpipe.core.mesh import PP, StageLayout, make_mesh
from jaxpipe.core.schedule import ORDERS, Lockstep
from jaxpipe.core.split.crossing import POLICIES
from jaxpipe.core.split.ports import Cotangent

MATRICES = {"gain": False, "up": True, "gate": True, "down": True}
SHARED = {"embed": True, "norm": False, "head": True}
HALF, ALL = {"gain", "up"}, set(MATRICES)  # frozen parameters of a layer
ORDER = ("half", "still") * 4


def specs(matrices, frozen, partial=()):
    return {
        name: ParamSpec(partial_grad_axes=partial, matrix=(0, 1) if is_matrix else None,
                        trained=name not in frozen)
        for name, is_matrix in matrices.items()
    }  # fmt: skip


def toy(shared, order=ORDER, half=HALF):
    """The toy model with layers of which half is frozen (`half`) or everything (`still`)."""
    kinds = {
        "half": replace(KIND, param_specs=specs(MATRICES, half)),
        "still": replace(KIND, param_specs=specs(MATRICES, ALL)),
    }
    of_ends = specs(SHARED, shared, (PP,))
    return replace(TOY, kinds=kinds, order=order, embed_head_specs=of_ends)


def problem(functions, schedule, dp, **execution):
    """Return the pipeline, its layout, parameters of embedding and head and layers, and a batch."""
    layout = StageLayout(
        (len(ORDER) // schedule.stages,) * schedule.stages, schedule.placement, functions.order
    )
    shared, layers = toy_params(0, len(ORDER), float)
    batch = toy_batch(1, schedule.microbatches, 2 * dp)
    mesh = make_mesh(schedule.pp, dp, devices=jax.devices()[: schedule.pp * dp])
    counts = layout.layers_per_stage
    pipeline = Pipeline(functions, schedule, mesh, counts, Execution(**execution))
    return pipeline, layout, shared, layers, batch


def check(functions, schedule, dp=2, **execution):
    """Compare with one device, where frozen parameters have no gradient either."""
    with jax.enable_x64(True):
        pipeline, layout, shared, layers, batch = problem(functions, schedule, dp, **execution)
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        got = jax.jit(pipeline.step)(params, batch)
        want = step_ref(functions, shared, layers, batch)
        every = step_ref(replace(TOY, kinds=KIND), shared, layers, batch)
        (trained, *_), ends = want.gradients["layers"], want.gradients["embed_head"]
        assert trained["up"] is None
        assert want.gradients["layers"][1] == dict.fromkeys(MATRICES)
        # What is left of the gradients does not depend on what is frozen.
        assert_same(trained["down"], every.gradients["layers"][0]["down"])
        for name, gradient in ends.items():
            if gradient is not None:
                assert_same(gradient, every.gradients["embed_head"][name])
        slots = layout.unstack(got.gradients["layers"])
        assert_same(
            (got.losses, got.gradients["embed_head"], slots),
            (want.losses, ends, want.gradients["layers"]),
        )


@pytest.mark.extended(only=["zbv"])
@pytest.mark.slow(unless=["1f1b", "zbv"])
@pytest.mark.parametrize("name", ORDERS)
def test_the_rest_has_the_gradients_of_one_device(name):
    check(toy({"embed", "norm"}), near(name, 2, 1), zero_stage=1, poison_bubbles=True)


@pytest.mark.extended
@pytest.mark.slow(unless=["3-True-head"])
@pytest.mark.parametrize("shared", ["head", "embed"])
@pytest.mark.parametrize(("stage", "reshard"), [(0, False), (1, False), (2, False), (3, True)])
def test_however_they_are_stored(stage, reshard, shared):
    schedule = build("zb_h1", pp=2, microbatches=4)
    how = {"zero_stage": stage, "reshard_after_forward": reshard}
    check(toy({shared}), schedule, **how, lockstep=Lockstep(defer_embed_head=True))


@pytest.mark.slow
def test_a_closing_tick_reduces_what_is_trained():
    check(toy({"norm"}), build("1f1b", pp=2, microbatches=4), overlap_sums=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_w_has_no_product_for_frozen_matrices(policy):
    """B stays what it is: it still makes the gradient at the input."""
    _, (params,) = toy_params(0, 1)
    rows = jax.tree.map(lambda a: a[0], toy_batch(1, 1, 3))
    x, context = jnp.ones((3, 6, WIDTH)), Context(rows)
    product = 2 * x.size * 2 * WIDTH

    def flops(frozen):
        kind = replace(KIND, param_specs=specs(MATRICES, frozen))
        split = TracedKind.trace("toy", kind, params, x, context, POLICIES[policy]).split
        _, kept = split.forward(params, x, context)
        of_b = params, context, kept, Cotangent(x)
        _, gradients, stash = split.backward_input(*of_b)
        of_w = params, context, kept.for_w, stash
        assert {name for name, g in gradients.params.items() if g is not None} == {"gain"} - frozen
        traced = jax.make_jaxpr(split.backward_input)(*of_b)
        return (
            dot_flops(traced.jaxpr, None),
            dot_flops(jax.make_jaxpr(split.backward_weight)(*of_w).jaxpr, None),
            len(jax.tree.leaves((kept.for_w, stash))),
        )

    (b, w, kept), (b_of_half, w_of_half, kept_of_half) = flops(set()), flops(HALF)
    assert (w, w_of_half) == (3 * product, 2 * product)
    assert b_of_half == b
    assert kept_of_half < kept
    assert flops(ALL) == (b, 0, 0)


def test_a_step_has_no_gradient_sums_of_them():
    """The carry of the scan has as many arrays of a matrix's shape as matrices are trained."""

    def sums(half, shared):
        functions, schedule = toy(shared, half=half), build("1f1b", pp=2, microbatches=4)
        pipeline, layout, ends, layers, batch = problem(functions, schedule, 1)
        params = {"embed_head": ends, "layers": layout.stack(layers)}
        scan = find_scan(jax.make_jaxpr(pipeline.losses_and_gradients)(params, batch).jaxpr)
        shapes = [var.aval.shape for var in scan.outvars]
        return [shapes.count(of) for of in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (VOCAB, WIDTH))]

    assert sums(set(), set()) == [4, 2, 1]  # up and gate, and down, of two layers a rank
    assert sums(HALF, {"embed"}) == [2, 2, 0]


def test_a_model_must_train_something():
    still = replace(KIND, param_specs=specs(MATRICES, ALL))
    with pytest.raises(ValueError, match="all 7 parameters of the model have trained=False"):
        StageFunctions(TOY.embed, still, TOY.head, TOY.count,
                       embed_head_specs=specs(SHARED, set(SHARED)))  # fmt: skip
    replace(TOY, kinds=still)  # embedding and head declare nothing: they are trained
