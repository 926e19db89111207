"""B of a layer with experts repeats no sort: F stores which row is in which slot."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from mixtures import SIZES

from jaxpipe.core.contract import Context
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.mesh import DP, EP, PP, RP, TP, ExpertParallel
from jaxpipe.core.split import POLICIES
from jaxpipe.core.split.split import Cotangent, split_layer
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.options import Sharing


def sorts(jaxpr):
    """Count the sorts of a jaxpr, also in its calls."""
    inner = [value for eqn in jaxpr.eqns for value in eqn.params.values()]
    bodies = [getattr(value, "jaxpr", None) for value in inner if hasattr(value, "jaxpr")]
    return sum(eqn.primitive.name == "sort" for eqn in jaxpr.eqns) + sum(map(sorts, bodies))


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize(("ep", "capacity"), [(1, 0.0), (1, 1.25), (2, 0.0), (2, 1.25)])
def test_b_and_w_do_not_sort(ep, capacity, remat):
    config = LlamaConfig(**SIZES, capacity_factor=capacity)
    replicas = ExpertParallel(ep) if ep > 1 else ALL_EXPERTS
    decoder = FAMILIES["llama"].build(config, sharing=Sharing(replicas=replicas))
    kind = decoder.functions.kinds_by_name["sparse"]
    init = partial(decoder.init_layer, index=0, kind="sparse")
    params = jax.eval_shape(init, jax.random.key(0))
    shard = lambda of, like: jax.ShapeDtypeStruct(  # noqa: E731
        tuple(size // dict((dim, ep) for axis, dim in of.sharded if axis == EP).get(i, 1)
              for i, size in enumerate(like.shape)), like.dtype,
    )  # fmt: skip
    params = jax.tree.map(shard, kind.param_specs, params)
    x = jax.ShapeDtypeStruct((2, 8, config.d_model), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    found = {}

    def on_device(params, x, ids, index):
        given = params, x, Context({"inputs": ids, "targets": ids}, index)
        split = split_layer(kind.layer, *given, POLICIES[remat], kind.keep)
        dy = Cotangent(x, (), split.output.aux.loss_sums)
        b = split.backward_input, (params, given[2], split.residuals, dy)
        w = split.backward_weight, (params, given[2], split.residuals.for_w, split.stash)
        for name, (run, args) in {"F": (split.forward, given), "B": b, "W": w}.items():
            found[name] = sorts(jax.make_jaxpr(run)(*args).jaxpr)

    mesh = AbstractMesh((1, 1, 1, ep, 1), (PP, RP, DP, EP, TP), axis_types=(AxisType.Auto,) * 5)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=None, check_vma=False
    )
    jax.eval_shape(run, params, x, ids, jax.ShapeDtypeStruct((), jnp.int32))
    assert found["F"] > 0
    assert (found["B"], found["W"]) == (0, 0)
