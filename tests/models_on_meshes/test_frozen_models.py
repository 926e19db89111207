"""Frozen parameters of a model whose layers and vocabulary are shared, against one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from meshes import pipeline_of, wanted

from jaxpipe.core.mesh.flags import is_trained, select
from jaxpipe.core.schedule import Lockstep


def frozen_decoder(functions, frozen):
    """Freeze the parameters of these names, in layers, embedding and head."""

    def of(path, spec):
        names = {key.key for key in path}
        return replace(spec, trained=not names & frozen)

    freeze = lambda tree: jax.tree_util.tree_map_with_path(of, tree)  # noqa: E731
    (name, kind), *_ = functions.kinds_by_name.items()
    kinds = {name: replace(kind, param_specs=freeze(kind.param_specs))}
    return replace(functions, kinds=kinds, embed_head_specs=freeze(functions.embed_head_specs))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_tensor_parallel_devices_and_a_shared_vocabulary(zero_stage):
    """A frozen embedding, final norm and query matrix, with the vocabulary on all ranks."""
    lockstep = Lockstep(vocab_parallel=True)
    with jax.enable_x64(True):
        pipeline, layout, params, batch = pipeline_of(
            "grouped", "zb_h1", 2, 2, 2, dtype=jnp.float64, lockstep=lockstep,
            zero_stage=zero_stage, sequence=True,
        )  # fmt: skip
        functions = frozen_decoder(pipeline.functions, {"embed", "final_norm", "wq"})
        pipeline = replace(pipeline, functions=functions)
        losses, got = jax.jit(pipeline.losses_and_gradients)(params, batch)
        want_losses, want = wanted("grouped", jnp.float64)
        want = want | {"layers": layout.stack(want["layers"])}
        trained = is_trained(pipeline.sharding.param_shardings(params))
        assert sum(not flag for flag in jax.tree.leaves(trained)) > 2
        assert_same((losses, got), (want_losses, select(trained, pipeline.sharding.pad(want))))
