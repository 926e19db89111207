"""Storage of parameters, and the all-gather, reduce-scatter and sharding that follow from it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import relative
from jax.sharding import PartitionSpec as Spec

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.mesh import (
    DP,
    EP,
    PP,
    RP,
    TP,
    ReplicaFactors,
    Sharding,
    TensorParallel,
    make_mesh,
)


def over(dim, *axes):
    return tuple((axis, dim) for axis in axes)


SHARED = {
    "embed": ParamSpec(over(0, TP), (PP,)),
    "head": ParamSpec(over(1, TP), (PP,)),
    "odd": ParamSpec((), (PP,)),
    "norm": ParamSpec((), (PP, TP)),
}
OF_ALL_RANKS = {
    "embed": ParamSpec(over(0, TP, PP)),
    "head": ParamSpec(over(1, TP, PP)),
    "odd": ParamSpec(),
    "norm": ParamSpec(),
}
OF_LAYER = {
    "up": ParamSpec(over(1, TP)),
    "down": ParamSpec(over(0, TP)),
    "gain": ParamSpec(),
    "odd": ParamSpec(),
}
LAYER = {"up": (2, 8, 12), "down": (2, 12, 8), "gain": (2, 8), "odd": (2, 7, 3)}
SHAPES = {
    "embed_head": {"embed": (24, 8), "head": (8, 24), "odd": (7, 5), "norm": (8,)},
    "layers": (LAYER, LAYER),
}


def shapes():
    def of(node):
        if isinstance(node, dict):
            return {name: of(inner) for name, inner in node.items()}
        if isinstance(node[0], dict):
            return tuple(map(of, node))
        return jax.ShapeDtypeStruct(node, jnp.float32)

    return of(SHAPES)


def sharding(zero_stage=1, shared=SHARED, layer=OF_LAYER):
    return Sharding(make_mesh(2, 2, 2), shared, lambda slot: layer, zero_stage)


def test_specs():
    got = sharding().partition_specs(shapes())
    assert got["embed_head"] == {
        "embed": Spec((TP, PP, DP)),
        "head": Spec((PP, DP), TP),
        "odd": Spec(),
        "norm": Spec((PP, DP)),
    }
    assert got["layers"][1] == {
        "up": Spec(PP, DP, TP),
        "down": Spec(PP, (TP, DP)),
        "gain": Spec(PP, DP),
        "odd": Spec(PP),
    }


def test_specs_with_a_shared_vocabulary():
    assert sharding(shared=OF_ALL_RANKS).partition_specs(shapes())["embed_head"] == {
        "embed": Spec((TP, PP, DP)),
        "head": Spec(DP, (TP, PP)),
        "odd": Spec(),
        "norm": Spec((PP, DP)),
    }


def test_specs_over_a_factor_of_the_replicas():
    """ep shards the parameters declared so; all others are sharded over dp and ep as one axis."""
    mesh = make_mesh(1, 8, 1, factors=ReplicaFactors(ep=2))
    experts = {"w": ParamSpec(over(0, EP)), "router": ParamSpec()}
    tree = {"w": jax.ShapeDtypeStruct((1, 2, 8, 8), "float32")}
    tree |= {"router": jax.ShapeDtypeStruct((1, 8, 16), "float32")}
    stored = Sharding(mesh, None, lambda slot: experts, 1).param_shardings({"layers": (tree,)})[
        "layers"
    ][0]
    assert stored["w"].partition_spec == Spec(PP, EP, DP)
    assert stored["router"].partition_spec == Spec(PP, (EP, DP))
    assert (stored["w"].grad_reduce_axes, stored["router"].grad_reduce_axes) == (
        (RP, DP),
        (RP, DP, EP),
    )


def test_a_parameter_over_ep_and_tp_is_sharded_in_the_order_that_it_declares():
    """Devices compute the shards that a `NamedSharding` gives them, also from one another's."""
    mesh = make_mesh(1, 4, 2, factors=ReplicaFactors(ep=2))
    experts = ParamSpec((*over(0, EP), *over(0, TP)), shape=(8, 3))
    full = jnp.arange(24.0).reshape(1, 8, 3)
    how = Sharding(mesh, None, lambda slot: {"w": experts}, 1)
    stored = how.param_shardings({"layers": ({"w": full},)})["layers"][0]["w"]
    assert stored.partition_spec == Spec(PP, (EP, TP, DP))

    def check(part):
        gathered = stored.gather(part, {DP, EP, TP})
        own = stored.shard(gathered, {DP, EP, TP})
        return jnp.stack([jnp.abs(gathered - full).max(), jnp.abs(own - part).max()])

    run = jax.shard_map(
        check, mesh=mesh, in_specs=stored.partition_spec, out_specs=Spec(), check_vma=False
    )
    assert not jax.jit(run)(full).any()


def test_specs_of_models_that_declare_nothing():
    got = Sharding(make_mesh(2, 2, 2)).partition_specs(shapes())
    assert got["embed_head"] == {
        "embed": Spec(PP),
        "head": Spec(PP),
        "odd": Spec(),
        "norm": Spec(PP),
    }
    assert set(got["layers"][0].values()) == {Spec(PP)}


@pytest.mark.parametrize("names", [{DP}, {PP, DP}, {TP, PP, DP}])
def test_gather_is_the_inverse_of_part(names):
    """All-gathered shards are the full array, and each device stores its own shard."""
    values = {
        name: jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(SHAPES["embed_head"].items())
    }
    how = sharding()
    stored = how.param_shardings({"embed_head": values})["embed_head"]

    def check(parts):
        def one(s, part, whole):
            gathered = s.gather(part, {TP, PP, DP})
            again = s.gather(s.shard(gathered, names), names)
            return jnp.stack([jnp.abs(gathered - whole).max(), jnp.abs(again - whole).max()])

        return jax.tree.map(one, stored, parts, values)

    specs = jax.tree.map(lambda s: s.partition_spec, stored)
    run = jax.shard_map(check, mesh=how.mesh, in_specs=(specs,), out_specs=Spec(), check_vma=False)
    assert not any(errors.any() for errors in jax.jit(run)(values).values())


def test_reduce_adds_up_and_cuts():
    how = sharding()
    stored = how.param_shardings({"embed_head": shapes()["embed_head"]})["embed_head"]
    base = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in SHAPES["embed_head"].items()
    }

    def run():
        scale = 1 + jax.lax.axis_index(PP) + 10 * jax.lax.axis_index(DP)
        local = jax.tree.map(lambda s, b: s.shard(jnp.asarray(b) * scale, {TP}), stored, base)
        return jax.tree.map(lambda s, g: s.reduce_scatter(g, {PP, DP}), stored, local)

    specs = jax.tree.map(lambda s: s.partition_spec, stored)
    got = jax.jit(
        jax.shard_map(run, mesh=how.mesh, in_specs=(), out_specs=specs, check_vma=False)
    )()
    total = sum(1 + p + 10 * d for p in range(2) for d in range(2))
    jax.tree.map(lambda g, b: np.testing.assert_array_equal(g, b * total), got, base)


@pytest.mark.parametrize("sequence", [False, True])
def test_operators_have_the_gradients_of_one_device(sequence):
    """A column and a row matrix, a gain before them, and a loss after: values and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, up = jax.random.normal(keys[0], (2, 8, 6)), jax.random.normal(keys[1], (6, 12))
    down, gain = jax.random.normal(keys[2], (12, 6)), 1 + jax.random.normal(keys[3], (6,))

    def loss(devices, x, up, down, gain):
        stream = x * gain[None, None]
        y = stream + devices.leave(jnp.tanh(devices.enter(stream) @ up) @ down)
        scores = devices.enter(y) @ up
        most = devices.largest(jax.lax.stop_gradient(scores.max(-1)))
        return jnp.log(devices.total(jnp.exp(scores - most[..., None]).sum(-1))).sum()

    want = jax.value_and_grad(partial(loss, ONE_DEVICE), (0, 1, 2, 3))(x, up, down, gain)
    mesh = make_mesh(1, 1, 4, devices=jax.devices()[:4])
    stream = Spec(None, TP) if sequence else Spec()

    def parallel(*args):
        value, (dx, dup, ddown, dgain) = jax.value_and_grad(
            partial(loss, TensorParallel(4, sequence)), (0, 1, 2, 3)
        )(*args)
        return value, (dx, dup, ddown, jax.lax.psum(dgain, TP) if sequence else dgain)

    specs = (stream, Spec(None, TP), Spec(TP), Spec())
    run = jax.shard_map(
        parallel, mesh=mesh, in_specs=specs, out_specs=(Spec(), specs), check_vma=False
    )
    errors = jax.tree.map(relative, jax.jit(run)(x, up, down, gain), want)
    assert max(jax.tree.leaves(errors)) <= 1e-6, errors
