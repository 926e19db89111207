"""Parts of a mixture of experts: settings, router, dispatch, losses, and the split of a layer."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernels import TOKAMAX
from mixtures import MODELS, SIZES, problem
from msgspec import structs

from jaxpipe.config import Config, ParallelConfig, TrainConfig
from jaxpipe.core.contract import Aux, Context
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.split import POLICIES
from jaxpipe.core.split.split import Cotangent, split_layer
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.layers.moe.balance import Balance
from jaxpipe.model.layers.moe.dispatch import (
    assign_equally,
    assign_groups,
    assign_sorted,
    gather_into_slots,
    sum_from_slots,
)
from jaxpipe.model.layers.moe.layer import choose_dispatch
from jaxpipe.model.layers.moe.products import multiply_by_kernel
from jaxpipe.model.layers.moe.router import Routes, choose
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.operations import operations_of


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"experts_per_token": 9}, "model.experts_per_token=9 exceeds model.n_experts=8"),
        ({"experts_per_token": 1}, "model.norm_topk_prob=true with model.experts_per_token=1"),
        ({"expert_groups": 3}, "model.expert_groups=3 must divide model.n_experts=8"),
        ({"groups_per_token": 2}, "at least model.groups_per_token=2"),
        (
            {"expert_groups": 8, "groups_per_token": 1},
            "model.experts_per_token=2 exceeds the 1 experts of each",
        ),
        ({"first_dense_layers": 4}, "leave none of 4 layers sparse"),
        ({"d_expert": 9}, "model.d_expert=9 must be a multiple of parallel.tp=2"),
        ({"n_experts": 0}, "model.d_expert=12 is of experts, but model.n_experts=0"),
    ],
)
def test_sizes_that_do_not_go_together(sizes, message):
    given = SIZES | sizes
    if not given["n_experts"]:
        given["experts_per_token"] = 1
    assert message in " ".join(LlamaConfig(**given).broken_rules(tp=2))


def test_who_has_all_experts_sends_no_row():
    rows = jnp.ones((1, 3, 4))
    assert ALL_EXPERTS.exchange(rows) is rows


@pytest.mark.parametrize("model", MODELS)
def test_parameters_and_active_flops_are_counted(model):
    config = MODELS[model]
    _, ends, layers, *_ = problem(model)
    assert config.parameter_count() == sum(leaf.size for leaf in jax.tree.leaves((ends, layers)))
    idle = 3 * (config.n_experts - config.experts_per_token) * 16 * 12 * len(config.sparse_layers)
    whole = LlamaConfig(**{**SIZES, "experts_per_token": 8})
    if model == "qwen":
        assert whole.flops_per_token(8) - config.flops_per_token(8) == 6 * idle


def test_the_choice_is_that_of_plain_loops():
    """DeepSeek-V3: the best experts of the groups whose two best scores have the largest sum."""
    config = MODELS["deepseek"]
    rng = np.random.default_rng(0)
    scores, bias = rng.uniform(size=(2, 5, 8)), rng.uniform(size=8)
    got = np.asarray(choose(jnp.asarray(scores), jnp.asarray(bias), config))
    for place in np.ndindex(2, 5):
        biased = (scores[place] + bias).reshape(4, 2)
        groups = np.argsort(-biased.sum(1))[:2]
        allowed = [group * 2 + i for group in groups for i in range(2)]
        want = sorted(allowed, key=lambda e: -biased.ravel()[e])[:3]
        assert got[place].tolist() == want


@pytest.mark.parametrize("places", ["sorted", "equal", "multiples"])
def test_rows_go_into_slots_and_back(places):
    """A gather into slots and a sum back, each the gradient of the other."""
    group = jnp.array([2, 0, 1, 1, 1, 0, 2, 1])
    made, last = {
        "sorted": lambda: (assign_sorted(group), 7),
        "equal": lambda: (assign_equally(group, 3, 3), 9),
        "multiples": lambda: (assign_groups(group, 3, 3)[0], 10),
    }[places]()
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (4, 5), jnp.float64)
        slots = gather_into_slots(x, made, 2)
        want = np.zeros((made.source_S.size, 5))
        for row, slot in enumerate(np.asarray(made.target_R)):
            if slot < len(want):
                want[slot] = x[row // 2]
        np.testing.assert_array_equal(slots, want)
        assert np.asarray(made.target_R).max() == last
        dy = jax.random.normal(jax.random.key(1), slots.shape, jnp.float64)
        (dx,) = jax.vjp(lambda x: gather_into_slots(x, made, 2), x)[1](dy)
        np.testing.assert_array_equal(dx, sum_from_slots(dy, made, 2))
        back = sum_from_slots(slots, made, 2)
        np.testing.assert_allclose((x * dx).sum(), (slots * dy).sum(), rtol=1e-14)
        (dslots,) = jax.vjp(lambda s: sum_from_slots(s, made, 2), slots)[1](back)
        np.testing.assert_array_equal(dslots, gather_into_slots(back, made, 2))


def test_the_loss_of_uneven_loads_is_1_a_token_where_they_are_even():
    config = LlamaConfig(**SIZES, router_aux_loss=1.0)
    balance = Balance(config)
    even = (2 * jnp.arange(8)[None, :, None] + jnp.arange(2)[None, None]) % 8
    shares = jnp.full((1, 8, 8), 1 / 8)
    weights = jnp.full((1, 8, 2), 1 / 2)

    def loss(choice, shares):
        routes = Routes(choice, weights, jnp.log(shares), shares)
        return float(balance.aux_outputs(routes, jnp.int32(0), jnp.int32(0)).loss_sums["router"])

    assert loss(even, shares) == pytest.approx(8)
    uneven = jnp.broadcast_to(jnp.arange(2)[None, None], (1, 8, 2))
    skewed = jnp.broadcast_to(jnp.array([[[0.5, 0.5] + [0] * 6]]), (1, 8, 8))
    assert loss(uneven, skewed) == pytest.approx(8 * 4)


@pytest.mark.parametrize("step", ["sign", "error"])
def test_a_bias_rises_where_few_tokens_chose(step):
    functions = LlamaDecoder(structs.replace(MODELS["one"], router_bias_step=step)).functions
    counts = np.tile([0, 1, 2, 0, 4, 5, 6, 14], (4, 1))  # 4 is the mean
    counts[1] *= 2
    side = Aux(sums={"expert_counts": jnp.asarray(counts, jnp.int32)})
    after = functions.next_variables(functions.variables, side)["router_bias"]
    few = 1 - np.array([0, 1, 2, 0, 4, 5, 6, 14]) / 4
    few = np.sign(few) if step == "sign" else few
    np.testing.assert_allclose(after, np.tile(0.01 * few, (4, 1)), rtol=1e-6, atol=0)
    nobody = Aux(sums={"expert_counts": jnp.zeros((4, 8), jnp.int32)})
    assert not functions.next_variables(functions.variables, nobody)["router_bias"].any()


def test_a_bias_tells_counts_apart_that_float32_does_not():
    functions = LlamaDecoder(MODELS["one"]).functions
    counts = np.full((4, 8), 2**28, np.int32)
    counts[:, 0] += 1
    counts[:, 1] -= 1
    counts[1] += 2**29
    side = Aux(sums={"expert_counts": jnp.asarray(counts)})
    after = functions.next_variables(functions.variables, side)["router_bias"]
    want = np.tile(0.01 * np.array([-1, 1, 0, 0, 0, 0, 0, 0]), (4, 1))
    np.testing.assert_allclose(after, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [2**10, 2**23, 2**28])
def test_what_is_logged_of_a_step_however_large(tokens):
    """48 layers, 8 of 128 experts a token: the rows of a layer or of all layers may exceed 2^31."""
    sizes = SIZES | {"n_layers": 48, "n_experts": 128, "experts_per_token": 8}
    functions = LlamaDecoder(LlamaConfig(**sizes)).functions
    mean = tokens * 8 // 128
    counts = np.full((48, 128), mean, np.int32)
    counts[:, 0] += mean // 2
    counts[:, 1] -= mean // 2
    dropped = np.linspace(0, 0.4, 48) * tokens * 8  # of each layer
    side = Aux(
        sums={
            "expert_counts": jnp.asarray(counts),
            "expert_rows_dropped": jnp.asarray(dropped, jnp.int32),
            "router_entropy": jnp.full(48, 2.0 * tokens),
        }
    )
    logged = functions.report(side)
    np.testing.assert_allclose(logged["expert_load_mean"], mean, rtol=1e-6)
    np.testing.assert_array_equal(logged["expert_load_max"], mean + mean // 2)
    np.testing.assert_allclose(logged["expert_dropped_share"], 0.2, rtol=1e-3)
    np.testing.assert_allclose(logged["router_entropy"], 2.0, rtol=1e-6)


def primitives(function, *args):
    """Return the names of all equations of a function, including those of inner calls."""
    names = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            names.append(eqn.primitive.name)
            for value in jax.tree.leaves(tuple(eqn.params.values())):
                if hasattr(value, "jaxpr"):
                    walk(value.jaxpr)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return names


def split_of(model, remat, product=lax.ragged_dot):
    """Return a sparse layer's split and its arguments."""
    decoder, _, layers, _, variables = problem(model)
    decoder = decoder.with_options(ops={"dispatch": partial(choose_dispatch, product=product)})
    kind, x = decoder.functions.kinds_by_name["sparse"], jnp.zeros((2, 8, 16))
    params, variables = jax.tree.map(jnp.float32, (layers[3], variables))
    context = Context({}, jnp.int32(3), None, variables)
    split = split_layer(kind.layer, params, x, context, POLICIES[remat], kind.keep)
    return split, params, x, context


@pytest.mark.parametrize("product", [lax.ragged_dot, multiply_by_kernel])
@pytest.mark.parametrize("remat", POLICIES)
def test_experts_are_chosen_once_and_cut_into_b_and_w(remat, product, monkeypatch):
    """W has one of three products of each matrix; B has another and, with remat, F's again."""
    monkeypatch.setitem(sys.modules, "tokamax", TOKAMAX)
    split, params, x, context = split_of("deepseek", remat, product)
    kept, dy = split.residuals, Cotangent(x, (), split.output.aux.loss_sums)
    forward = primitives(split.forward, params, x, context)
    in_b = primitives(split.backward_input, params, context, kept, dy)
    of_w_given = params, context, kept.for_w, split.stash, dy.losses
    in_w = primitives(split.backward_weight, *of_w_given)
    assert "top_k" in forward
    assert "top_k" not in in_b + in_w
    assert forward.count("ragged_dot_general") == in_w.count("ragged_dot_general") == 3
    again = {"none": 0, "selective": 0, "full": 2}[remat]
    assert in_b.count("ragged_dot_general") == 3 + again
    together = primitives(split.backward, params, context, kept, dy)
    for name in ("ragged_dot_general", "dot_general"):
        assert together.count(name) == in_b.count(name) + in_w.count(name)
    if product is lax.ragged_dot:
        flops = lambda f, *given: operations_of(jax.make_jaxpr(f)(*given).jaxpr).flops()  # noqa: E731
        of_b = flops(split.backward_input, params, context, kept, dy)
        of_w = flops(split.backward_weight, *of_w_given)
        assert flops(split.backward, params, context, kept, dy) == of_b + of_w


@pytest.mark.parametrize("remat", POLICIES)
def test_no_row_of_a_token_is_stored_but_what_is_inside_an_expert(remat):
    """Gathers are recomputed: stored arrays are as wide as an expert, or numbers, or per token."""
    split, *_ = split_of("qwen", remat)
    rows = 2 * 8 * 2
    stored = [leaf.shape for leaf in (*split.residuals.for_b, *split.residuals.for_w, *split.stash)]
    wide = [shape for shape in stored if shape[0] == rows and len(shape) == 2 and shape[1] > 12]
    assert not wide


@pytest.mark.parametrize("model", ["qwen", "deepseek", "narrow"])
def test_a_plan_counts_the_products_of_active_experts(model):
    """F of a sparse layer in closed form, with a capacity's slots. B and W of experts equal F."""
    config = MODELS[model]
    train = TrainConfig(steps=1, grad_accum_steps=1, microbatch_size=2, seq_len=8)
    costs = costs_of(Config(model=config, parallel=ParallelConfig(), train=train))
    layer, tokens, d = costs.kinds["sparse"], 16, 16
    rows = tokens * config.experts_per_token
    if config.capacity_factor:
        rows = 8 * 2 * 1  # experts x sequences x slots
    experts = 6 * d * 12 * (rows + tokens * config.shared_experts)
    router, attention = 2 * tokens * d * 8, 8 * tokens * d * d
    scores = 4 * 2 * 8 * 8 * d
    assert experts + router + attention + scores == layer.F
    assert layer.F + scores == layer.B
    assert layer.F - scores == layer.W


def test_modules_have_the_leaves_that_replicas_and_devices_cut():
    leaves = LlamaDecoder(MODELS["qwen"]).functions.kinds_by_name["sparse"].param_specs["moe"]
    assert leaves["experts"]["w_up"].sharded == (("ep", 0), ("tp", 2))
    assert leaves["experts"]["w_down"].sharded == (("ep", 0), ("tp", 1))
    assert leaves["experts"]["w_down"].matrix == (1, 2)
    assert leaves["router"]["gate"].sharded == ()
