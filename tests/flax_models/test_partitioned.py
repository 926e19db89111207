"""Functions of one device, evaluated on shards over tp."""

import re

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from jax.sharding import PartitionSpec

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.mesh import TP, make_mesh
from jaxpipe.flax_models.partitioned import partition

HEADS, SIZE = 4, 3
WIDTH = HEADS * SIZE


def mlp(params, x, data):
    return x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def attention(params, x, data):
    """RoPE-like rotation, grouped keys, a mask, and softmax, by heads."""
    query, key, value = (
        jnp.einsum("bld,dhk->blhk", x, params[name]) for name in ("query", "key", "value")
    )
    first, second = jnp.split(jnp.pad(query, ((0, 0),) * 3 + ((0, 1),)), 2, axis=-1)
    query = jnp.concatenate([-second, first], axis=-1)[..., :SIZE]
    key = jnp.repeat(key[:, :, :, None], 1, axis=3).reshape(key.shape)
    scores = jnp.einsum("blhk,bmhk->bhlm", query, key)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(jnp.where(mask, scores, -1e30)), value)
    return x + mixed.reshape(x.shape) @ params["out"]


def without_rules(params, x, data):
    """Operations along the sharded dim, and a loop, gather what they read."""
    up = x @ params["up"]
    hidden = jnp.sort(jnp.cumsum(up, axis=-1), axis=-1)[..., ::-1] + up[..., ::5].mean()
    step = lambda total, row: (total + jnp.sin(row), total)  # noqa: E731
    total, rows = jax.lax.scan(step, jnp.zeros_like(hidden[0]), hidden)
    hidden = hidden / (1 + hidden.max(-1, keepdims=True) ** 2) + total[None] - hidden.min()
    hidden = jnp.roll(hidden, 1, axis=-1) + rows + hidden.sum(-1, keepdims=True)
    return (
        x
        + hidden @ params["down"]
        + params["down"].sum()
        + (params["up"] * params["up"].T[:WIDTH, :1]).sum()
    )


def table(params, x, data):
    """A look-up in a sharded table, and products of it in both orders."""
    return jnp.tanh(params["table"][data]) @ (params["table"].T @ params["table"]) + x


def specs(**dims):
    return {name: ParamSpec(() if dim is None else ((TP, dim),)) for name, dim in dims.items()}


CASES = {
    "mlp": (mlp, specs(up=1, bias=2, down=0)),
    "mlp, bias replicated": (mlp, specs(up=1, bias=None, down=0)),
    "mlp, along inputs": (mlp, specs(up=0, bias=None, down=1)),
    "attention": (attention, specs(query=1, key=1, value=1, out=0)),
    "attention, values replicated": (attention, specs(query=1, key=1, value=None, out=0)),
    "attention, along sizes": (attention, specs(query=0, key=1, value=0, out=1)),
    "without rules": (without_rules, specs(up=1, down=0)),
    "table": (table, specs(table=0)),
    "nothing sharded": (mlp, specs(up=None, bias=None, down=None)),
}
SHAPES = {
    "up": (WIDTH, 4 * WIDTH), "bias": (1, 1, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
    "query": (WIDTH, HEADS, SIZE), "key": (WIDTH, HEADS, SIZE), "value": (WIDTH, HEADS, SIZE),
    "out": (WIDTH, WIDTH), "table": (8, WIDTH),
}  # fmt: skip


def arguments(specs):
    def normal(i, shape):
        return jax.random.normal(jax.random.key(i), shape, jnp.float64)

    params = {name: normal(i, SHAPES[name]) for i, name in enumerate(specs)}
    x, dy = normal(10, (2, 5, WIDTH)), normal(11, (2, 5, WIDTH))
    return params, x, jax.random.randint(jax.random.key(12), (2, 5), 0, 8), dy


def gradients(function):
    def run(params, x, data, dy):
        y, pull = jax.vjp(lambda params, x: function(params, x, data), params, x)
        return (y, *pull(dy))

    return run


def on_devices(function, specs, tp):
    mesh = make_mesh(1, tp=tp, devices=jax.devices()[:tp])
    stored = jax.tree.map(
        lambda spec: (
            PartitionSpec(*[None] * spec.sharded[0][1], TP) if spec.sharded else PartitionSpec()
        ),
        specs,
    )
    every = PartitionSpec()
    return jax.shard_map(
        gradients(partition(function, specs, tp)),
        mesh=mesh,
        in_specs=(stored, every, every, every),
        out_specs=(every, stored, every),
        check_vma=False,
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_shards_compute_the_same(case, tp):
    function, how = CASES[case]
    with jax.enable_x64(True):
        given = arguments(how)
        assert_same(jax.jit(on_devices(function, how, tp))(*given), gradients(function)(*given))


@pytest.mark.parametrize(("case", "all_reduces"), [("mlp", 2), ("attention", 4)])
def test_megatron_sharding_needs_all_reduces_alone(case, all_reduces):
    """One in F and one in B; for attention queries, keys and values each have one in B."""
    function, how = CASES[case]
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(on_devices(function, how, 2))(*arguments(how)))
    assert "all_gather" not in text
    assert len(re.findall(r"= psum\w*\[", text)) == all_reduces
