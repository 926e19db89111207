"""What only a GPU shows: run as `JAX_PLATFORMS=cuda pytest -m gpu tests/gpu`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import cal_diff

from jaxpipe import config as configs
from jaxpipe.bench import train
from jaxpipe.pipeline.reference import losses_and_gradients_ref
from jaxpipe.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here"),
]
SIZES = [
    "model.d_model=256", "model.n_heads=4", "model.n_kv_heads=2", "model.d_ff=512",
    "parallel.pp=1", "parallel.dp=1", "train.seq_len=256", "train.microbatch_size=2",
]  # fmt: skip
SMALL = Path(__file__).parents[1] / "data" / "small.toml"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_are_the_references(schedule):
    with jax.default_matmul_precision("highest"):
        trainer = Trainer(configs.load(SMALL, [*SIZES, f"parallel.schedule={schedule}"]))
        params = trainer.init().params
        ids = np.random.default_rng(0).integers(0, 256, (4, 2, 257), np.int32)
        batch = {"inputs": ids[..., :-1], "targets": ids[..., 1:]}
        losses, got = jax.jit(trainer.pipeline.losses_and_gradients)(params, trainer.put(batch))
        layers = [jax.tree.map(lambda leaf: leaf[0], slot) for slot in params["layers"]]
        wanted, want = losses_and_gradients_ref(
            trainer.pipeline.functions, params["shared"], layers, batch
        )
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    got["layers"] = [jax.tree.map(lambda leaf: leaf[0], slot) for slot in got["layers"]]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert cal_diff(np.asarray(one), np.asarray(other)) < 1e-10


def test_bfloat16_with_the_fused_attention_learns():
    config = configs.load(
        SMALL, [*SIZES, "model.attention=cudnn", "train.compute_dtype=bfloat16", "train.remat=full"]
    )
    found = train.measure(config, steps=3)
    assert found["losses"][1] < found["losses"][0]
    assert found["peak_memory_bytes"] > 4 * found["parameters"]
    assert jnp.isfinite(found["step_seconds"])
