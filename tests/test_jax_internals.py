"""What jaxpipe uses of jax's undocumented functions works with this version."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe.core.jax_internals import (
    cudnn_attention,
    define_primitive,
    distributed_state,
    give_collectives_channels,
    keep_outputs,
    set_memory_kinds,
    used_inputs,
)

pytestmark = pytest.mark.versions


def test_a_primitive_is_traced_by_its_shapes_and_runs_as_it_is_lowered():
    pair = define_primitive(
        "sum_and_scaled",
        lambda x, *, scale: [jax.ShapeDtypeStruct((), x.dtype), x],
        lambda x, *, scale: [x.sum(), scale * x],
    )
    run = lambda x: pair.bind(x, scale=3)  # noqa: E731
    total, scaled = jax.eval_shape(run, jnp.ones((2, 3)))
    assert (total.shape, scaled.shape) == ((), (2, 3))
    total, scaled = jax.jit(run)(jnp.ones((2, 3)))
    assert total == 6
    np.testing.assert_array_equal(scaled, np.full((2, 3), 3))


@pytest.mark.parametrize(("mask", "window"), [("CAUSAL", 0), ("CAUSAL", 8), ("NO_MASK", 0)])
def test_attention_becomes_calls_of_cudnn(mask, window):
    """Compiled for a GPU as far as the program that XLA gets."""

    def run(q, k, v, dmixed):
        unused = [jnp.zeros(0, q.dtype)] * 7
        forward, how = cudnn_attention("fwd", 64, mask, window)
        mixed, logsumexp = forward.bind(q, k, v, *unused, **how, is_training=True)
        gradient, how = cudnn_attention("bwd", 64, mask, window)
        return gradient.bind(q, k, v, *unused, logsumexp, mixed, dmixed, **how)

    x = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")
    traced = jax.jit(run).trace(x, x, x, x)
    assert [out.shape for out in traced.out_info] == [x.shape] * 3
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text
    assert "__cudnn$fmhaSoftmaxBackward(" in text
    options = text.replace("\\22", '"')
    assert options.count(f'"mask_type": "{mask}"') == 2
    assert options.count(f'"sliding_window_length": {window}') == 2


def test_an_output_needs_the_inputs_that_it_is_computed_from():
    closed = jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1.0, 2.0)
    assert used_inputs(closed, [True, False]) == [True, False]
    assert used_inputs(closed, [False, True]) == [True, True]


def test_a_jaxpr_keeps_what_its_outputs_need():
    """Also within a rematerialised function, whose other outputs nobody reads."""
    both = jax.checkpoint(lambda x, y: (jnp.sin(x), y + 1))
    closed = jax.make_jaxpr(lambda x, y: both(x, y)[1])(1.0, 2.0)
    kept, used = keep_outputs(closed)
    assert used == [False, True]
    assert (len(kept.jaxpr.invars), "sin" in str(kept.jaxpr)) == (1, False)


def test_collectives_of_a_program_for_cpus_have_different_channels():
    """Two collectives that no data orders are otherwise one to XLA for CPUs."""
    give_collectives_channels()

    def collectives(x):
        nested = lax.fori_loop(0, 3, lambda _, y: lax.all_gather(y, "i").sum(0), x)
        exchanged = lax.all_to_all(x, "i", 0, 0), lax.ppermute(x, "i", [(0, 1), (1, 0)])
        return nested, lax.all_gather(x, "i"), lax.psum(x, "i"), exchanged

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    mapped = jax.shard_map(collectives, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    traced = jax.jit(mapped).trace(jnp.ones(4))

    def channels(platform):
        return re.findall(r"handle = (\d+)", traced.lower(lowering_platforms=(platform,)).as_text())

    assert channels("cpu") == ["1", "2", "3", "4", "5"]
    assert channels("cuda") == ["1"] * 5


def test_a_run_of_one_process_has_no_client():
    state = distributed_state()
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)


def test_a_lowered_program_is_told_where_its_arguments_are():
    """Of arguments that it does not use, jax has none in the program."""
    lowered = jax.jit(lambda x, unused, y: x + y).lower(1.0, 2.0, jnp.ones(3))
    set_memory_kinds(lowered, ("device", "device", "pinned_host"))
    arguments = re.findall(r"%arg\d: [^%]*", lowered.as_text())
    kinds = [re.findall(r'mhlo.memory_kind = "(\w+)"', one) for one in arguments]
    assert kinds[:2] == [["device"], ["pinned_host"]]
    assert float(lowered.compile()(1.0, 2.0, jnp.ones(3)).sum()) == 6
