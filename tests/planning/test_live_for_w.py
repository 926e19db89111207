"""What a layer's W keeps live beside B of the next layer in BW: by hand, and of a model's layer."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpipe.config import load
from jaxpipe.planning import resolve
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.trace import live_for_w

IN, OUT = 3, 5
SMALL, HYBRID = "tests/data/small.toml", "configs/quickstart_hybrid.toml"


def backward(w, x, dy):
    """BW of x @ w, whose B and W have barriers of their own; W does not read the shard."""
    dy = lax.optimization_barrier((dy, w))[0]
    shard = x[:1]
    dx = dy @ w.T
    _, x, dy = lax.optimization_barrier((shard, x, dy))
    dw = lax.optimization_barrier(x.T @ dy)
    return dx, dw


@pytest.mark.parametrize(
    ("tokens", "sends", "floats"),
    [
        (1, False, 1 * (IN + OUT)),  # x and dy are less than the gradient: the product waits
        (2, False, IN * OUT),  # the product frees more than it writes
        (2, True, 2 * (IN + OUT)),  # it waits in any case, for the collectives that it hides
    ],
)
def test_w_keeps_what_it_reads_or_what_it_writes(tokens, sends, floats):
    shapes = (IN, OUT), (tokens, IN), (tokens, OUT)
    both = jax.make_jaxpr(backward)(*map(jnp.ones, shapes)).jaxpr
    handed = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, IN), *shapes[1:])]
    assert live_for_w(both, handed, 4 * IN * OUT, sends=sends) == 4 * floats


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_barriers_of_the_attention_hand_nothing_to_w(method):
    how = ["train.seq_len=256", "parallel.pp=2", "parallel.dp=2", "parallel.cp=2"]
    layer = costs_of(load(SMALL, [*how, f"parallel.cp_method={method}"])).kinds["layer"]
    assert layer.working["BW"].results == layer.stash


def test_w_keeps_gathered_values_and_not_their_shards():
    """What devices of a layer keep is the same if they divide the sequence between its products."""
    how = ["parallel.pp=2", "parallel.dp=1", "parallel.tp=2", "train.remat=full"]
    shared = [*how, "parallel.sequence_parallel=true"]
    alone, gathered = (costs_of(load(SMALL, given)).kinds["layer"] for given in (how, shared))
    assert gathered.working["BW"].results == alone.working["BW"].results


def test_a_neighbours_stash_is_live_beside_a_layer():
    """Not its own once more, however large it is."""
    how = ["parallel.pp=1", "parallel.ep=2", "train.remat=full", "train.loss_chunks=8"]
    layers = ["model.n_layers=2", "model.first_dense_layers=1", "model.n_experts=4"]
    config = load(SMALL, [*how, *layers, "model.experts_per_token=2"])
    dense, sparse = (kind.working["BW"] for kind in costs_of(config).kinds.values())
    assert sparse.results > dense.results > 0
    assert resolve(config).memory.working == sparse.peak + dense.results


def test_a_later_layers_w_ends_with_the_last_collective():
    """After that, where a gated delta network takes most, the later layer's stash is gone."""
    how = ["model.n_layers=2", "parallel.pp=1", "parallel.ep=2", "parallel.schedule=1f1b"]
    sizes = ["model.n_experts=4", "model.experts_per_token=2", "model.d_ff=128"]
    delta = ["model.delta_key_dim=64", "model.delta_value_dim=64"]
    config = load(HYBRID, [*how, *sizes, *delta, "train.remat=full", "train.loss_chunks=8"])
    first, later = (kind.working["BW"] for kind in costs_of(config).kinds.values())
    assert first.peak > first.sending > later.peak > later.results > 0
    working = resolve(config).memory.working
    until, alone = first.sending + later.results, max(first.peak, later.peak + first.results)
    assert first.peak + later.results > working == max(until, alone)
