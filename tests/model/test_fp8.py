"""Products in 8-bit floats against NumPy with the same roundings; scales, sizes, costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from oracles.fp8 import emulated

from jaxpipe.config import Config, ConfigError, LoraConfig, ParallelConfig, TrainConfig
from jaxpipe.core.contract import Aux, Context
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.fp8 import E4M3, E5M2, PLAIN, Fp8, compute_scale
from jaxpipe.model.layers.lora import Adapter, LoraDot
from jaxpipe.planning import Devices, resolve
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import Hardware, analytic
from jaxpipe.planning.rules.fp8 import check_fp8

NAMES = ("up", "gate")
EXPERTS = {"n_experts": 4, "experts_per_token": 2, "capacity_factor": 1.0}


def problem(dtype):
    """Return x, two weights and the gradients of their products, none of them exact in 8 bits."""
    rng = np.random.default_rng(0)
    x, up, gate = (rng.normal(size=shape) for shape in ((2, 5, 16), (16, 32), (16, 48)))
    dys = [1e-7 * rng.normal(size=(2, 5, width)) for width in (32, 48)]
    return jax.tree.map(lambda a: np.asarray(a, np.float32).astype(dtype), (x, (up, gate), dys))


@pytest.mark.parametrize("history", [0, 3], ids=["current", "delayed"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_products_and_gradients_have_the_roundings_of_8_bits(history, dtype):
    with jax.enable_x64(True):
        x, weights, dys = problem(jnp.dtype(dtype))
        scales = 2.0 ** np.array([[-8, -7, -38], [-9, -9, -42]])  # the last of each saturates
        fp8 = Fp8(history)
        variables = {"fp8_scale": jnp.asarray(np.stack([np.ones_like(scales), scales]), "float32")}

        def run(x, weights, variables):
            dot = fp8.dot(NAMES, ONE_DEVICE, Context({}, jnp.int32(1), None, variables))
            return dot(x, **dict(zip(NAMES, weights)))

        made, pull = jax.vjp(run, x, weights, variables)
        dx, dweights, seen = pull(tuple(map(jnp.asarray, dys)))
        got = list(made), dx, list(dweights)
        want = emulated(x, weights, dys, list(scales) if history else None)
        if dtype == "float64":
            assert_same(got, want, 1e-14)
        else:  # a sum may round to either neighbour, except dx, which is a sum of rounded terms
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                np.testing.assert_allclose(
                    np.asarray(one, np.float32), other, 2**-7, 1e-2 * other.std()
                )
        if history:
            largest = [[np.abs(a).max() for a in (x, w, dy)] for w, dy in zip(weights, dys)]
            np.testing.assert_array_equal(
                seen["fp8_scale"], np.array([0 * scales, largest], np.float32)
            )


def test_plain_products_have_no_state():
    assert PLAIN.observed == ()
    assert PLAIN.variables(layers=2, products=3) == PLAIN.next_variables({}, Aux()) == {}


@pytest.mark.parametrize("history", [0, 3], ids=["current", "delayed"])
def test_products_of_experts_are_those_of_each(history):
    """Each expert has scales of its own, also if values differ by more than the range of 8 bits."""
    sizes = np.array([1.0, 2.0**-40, 2.0**30]).reshape(3, 1, 1)
    rng, scale = np.random.default_rng(1), 2.0 ** np.array([-8, -7, -38])
    x, weight, dy = (sizes * rng.normal(size=(3, *shape)) for shape in ((6, 16), (16, 32), (6, 32)))
    with jax.enable_x64(True):
        variables = {"fp8_scale": jnp.asarray(scale, "float32")[None, None]}
        dot = Fp8(history).dot(("up",), ONE_DEVICE, Context({}, jnp.int32(0), None, variables))
        (made,), pull = jax.vjp(lambda x, weight: dot(x, up=weight), x, weight)
        dx, dweight = pull((jnp.asarray(dy),))
        for expert in range(3):
            given = x[expert][None], [weight[expert]], [dy[expert][None]]
            want = emulated(*given, [scale] if history else None)
            got = [made[expert][None]], dx[expert][None], [dweight[expert]]
            assert_same(got, want, 1e-14)


@pytest.mark.parametrize("experts", [(), (3,)], ids=["dense", "experts"])
def test_adapters_are_not_rounded(experts):
    """Beside a frozen product in 8 bits: the result and the gradients of input and adapter."""
    rng = np.random.default_rng(4)
    shapes = {"x": (6, 16), "w": (16, 32), "dy": (6, 32), "a": (16, 2), "b": (2, 32)}
    every = {name: rng.normal(size=(*experts, *shape)) for name, shape in shapes.items()}
    with jax.enable_x64(True):
        base = Fp8().dot(("up",), ONE_DEVICE, Context({}, jnp.int32(0), None, {}))

        def product(x, adapter):
            dot = LoraDot(base, {"up": adapter}, 0.5, lambda inputs, name: inputs, set())
            return dot(x, up=jnp.asarray(every["w"]))[0]

        y, pull = jax.vjp(product, every["x"], Adapter(every["a"], every["b"]))
        dx, own = pull(jnp.asarray(every["dy"]))
    for expert in np.ndindex(experts):
        x, w, dy, a, b = (every[name][expert] for name in shapes)
        (rounded,), dx_rounded, _ = emulated(x[None], [w], [dy[None]], None)
        got = y[expert], dx[expert], own.a[expert], own.b[expert]
        want = (
            rounded[0] + 0.5 * x @ a @ b, dx_rounded[0] + 0.5 * dy @ b.T @ a.T,
            0.5 * x.T @ dy @ b.T, 0.5 * (x @ a).T @ dy,
        )  # fmt: skip
        assert_same(got, want, 1e-14)


def test_what_is_lost_is_bits_and_not_range():
    """Errors are those of as many bits with any exponent: finer scales would not reduce them."""
    rng = np.random.default_rng(2)

    def heavy(*shape):
        return jnp.asarray(rng.normal(size=shape) * np.exp(1.5 * rng.normal(size=shape)), "float32")

    def distance(got, want):
        return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))

    def bits(a, count):
        return jax.lax.reduce_precision(a, 8, count)

    x, weight, dy = heavy(64, 48), heavy(48, 32), heavy(64, 32)
    dot = Fp8().dot(("up",), ONE_DEVICE, Context({}, jnp.int32(0), None, {}))
    (made,), pull = jax.vjp(lambda x, weight: dot(x, up=weight), x, weight)
    got, want = (made, *pull((dy,))), (x @ weight, dy @ weight.T, x.T @ dy)
    x_3, weight_3, dy_2 = bits(x, 3), bits(weight, 3), bits(dy, 2)
    least = x_3 @ weight_3, dy_2 @ weight_3.T, x_3.T @ dy_2
    for each in zip(got, least, want):
        assert 0.01 < distance(each[0], each[2]) < 1.02 * distance(each[1], each[2])


def test_scales_follow_the_largest_of_the_history():
    fp8 = Fp8(2)
    first = fp8.variables(layers=1, products=1)
    assert first["fp8_scale"].tolist() == [[[2.0**-1, 2.0**-7, 2.0**-20]]]
    seen = lambda *largest: Aux(maxima={"fp8_scale": jnp.float32([[largest]])})  # noqa: E731
    once = fp8.next_variables(first, seen(3.0, 0.0, jnp.inf))  # 0.0: not observed, unchanged
    assert once["fp8_scale"].tolist() == [[[2.0**-6, 2.0**-7, 2.0**-20]]]
    twice = fp8.next_variables(once, seen(1.0, 4.0, 1.0))
    assert twice["fp8_scale"].tolist() == [[[2.0**-6, 2.0**-5, 2.0**-14]]]
    thrice = fp8.next_variables(twice, seen(0.5, 0.25, 0.0))
    assert thrice["fp8_scale"].tolist() == [[[2.0**-7, 2.0**-5, 2.0**-14]]]
    assert thrice["fp8_history"].tolist() == [[[[0.5, 1.0], [0.25, 4.0], [0.0, 1.0]]]]


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_no_largest_value_saturates(form):
    largest = jnp.float32([1e-20, 0.99999994, 1.0, 3.0, 448.0, 1e30])
    reached = largest / compute_scale(largest, form)
    assert form.largest / 3.5 <= float(reached.min())
    assert float(reached.max()) < form.largest / 1.75 * (1 + 1e-6)
    assert not jnp.isfinite(compute_scale(jnp.float32([jnp.nan, jnp.inf]), form)).any()


def settings(parallel=None, train=None, lora=None, **model):
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128,
             "vocab_size": 96} | model  # fmt: skip
    given = {"steps": 1, "grad_accum_steps": 1, "microbatch_size": 2, "seq_len": 32,
             "compute_dtype": "bfloat16", "fp8": "delayed"} | (train or {})  # fmt: skip
    return Config(
        model=LlamaConfig(**sizes).resolved(), parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**given), lora=LoraConfig(**(lora or {})),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (settings(d_model=72, head_dim=16), "multiples of 16, but model.d_model is 72: change it"),
        (settings(d_ff=120), "but model.d_ff / parallel.tp is 120"),
        (settings({"tp": 2}, d_ff=176), "but model.d_ff / parallel.tp is 88"),
        (settings(n_kv_heads=1, head_dim=8), "a device's keys, heads x model.head_dim, is 8"),
        (settings({"slices": 4}, {"microbatch_size": 1}), "train.seq_len / parallel.slices is 8"),
        (
            settings(train={"variable_length": True, "microbatch_size": 1, "seq_len": 1000}),
            "train.microbatch_size x train.seq_len is 1000",
        ),
        (settings(**EXPERTS, d_expert=24), "but model.d_expert / parallel.tp is 24"),
        (
            settings({"tp": 2}, **EXPERTS, d_expert=48, shared_experts=1),
            "but model.shared_experts x model.d_expert / parallel.tp is 24",
        ),
    ],
)
def test_what_does_not_fit_is_refused(config, message):
    with pytest.raises(ConfigError, match="train.fp8=none") as caught:
        check_fp8(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    check_fp8(settings())


def test_gpus_without_8_bit_products_are_refused():
    with pytest.raises(ConfigError, match=r"Hopper\) or later, but these have 8.0"):
        resolve(settings(), Devices("cuda", count=1, capability=8.0))
    with pytest.raises(ConfigError, match="the device 'A100', which does not multiply 8-bit"):
        analytic(settings(), Hardware("A100"))


def flops_in_fp8(layer):
    return {op: layer.kernels[op].flops(itemsize=1) for op in "FBW"}


def test_a_plan_knows_what_is_in_8_bits():
    fp8, plain = (
        costs_of(settings(train={"fp8": fp8})).kinds["layer"] for fp8 in ("delayed", "none")
    )
    tokens, matrices = 2 * 32, 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    assert flops_in_fp8(fp8) == dict.fromkeys("FBW", 2.0 * tokens * matrices)
    assert [fp8.F, fp8.B, fp8.W] == [plain.F, plain.B, plain.W]
    assert flops_in_fp8(plain) == dict.fromkeys("FBW", 0.0)
    waits = {value.dtype for value in fp8.waits["stash"]}
    assert waits == {jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")}


def test_a_plan_knows_that_adapters_are_not_in_8_bits():
    """Frozen products have no W, and an adapter's W reads inputs in the dtype of the stream."""
    adapted, plain = (costs_of(settings(lora=lora)).kinds["layer"] for lora in ({"rank": 4}, None))
    assert flops_in_fp8(adapted) == flops_in_fp8(plain) | {"W": 0.0}
    assert adapted.F - plain.F == adapted.B - plain.B == adapted.W > 0
    stored = {value.dtype for name in ("for_w", "stash") for value in adapted.waits[name]}
    assert stored == {jnp.dtype("bfloat16")}


@pytest.mark.extended
def test_a_plan_knows_which_experts_multiply_in_8_bits():
    """Those with a capacity in all of their slots; without, in multiples of 128 for each expert.

    Without a capacity products in 8 bits need sizes that are multiples of 128.
    """
    tokens, slots = 2 * 32, 2 * 32 * 2  # two per token
    for factor, width, rows in ((1.0, 64, slots), (0.0, 64, 0), (0.0, 128, 512)):
        config = settings(**EXPERTS | {"capacity_factor": factor}, d_model=width, d_expert=width)
        sparse = costs_of(config).kinds["sparse"]
        want = 2.0 * (tokens * width * width * 3 + rows * 3 * width * width)
        assert flops_in_fp8(sparse) == dict.fromkeys("FBW", want)
