"""What a device stores once: parameters as ops read them, and the sum that adapters add to."""

import pytest

from jaxpipe.config import load
from jaxpipe.core.split import POLICIES
from jaxpipe.planning import costs_of, resolve

SMALL = "tests/data/small.toml"
WIDTH, LAYERS = 32, 1  # of the model; of a pipeline rank
EXPERTS = ("model.experts_per_token=2", "model.capacity_factor=2.0", "parallel.ep=2",
           "parallel.zero_stage=3", "train.compute_dtype=float32")  # fmt: skip


def bytes_of(*overrides):
    return resolve(load(SMALL, ["parallel.vocab_parallel_pp=true", *overrides])).memory


def test_a_frozen_vocabulary_over_pp_is_not_copied_with_the_norm():
    """Of what adapters leave frozen here, the final norm alone is sharded and gathered."""
    adapters = "lora.rank=2", "lora.alpha=2.0", "train.compute_dtype=bfloat16"
    found = bytes_of(*adapters, "parallel.dp=1")
    assert found.copies == found.gradients // 2 + 2 * WIDTH  # adapters are float32, and cast


@pytest.mark.parametrize("reshards", ["false", "true"])
def test_experts_over_ep_are_not_copied_with_the_router(reshards):
    """In float32, and as many devices over ep as replicas: twice the experts, twice the routers."""
    how = *EXPERTS, f"parallel.reshard_after_forward={reshards}"
    few, many = (bytes_of(*how, f"model.n_experts={experts}").copies for experts in (4, 8))
    assert many - few == 4 * WIDTH * 4 * LAYERS


@pytest.mark.parametrize("remat", POLICIES)
def test_a_product_and_its_adapters_are_stored_as_their_sum(remat):
    """Of both products; W reads besides what the 7 adapters make of 32 tokens, rank 2."""
    adapters = "lora.rank=2", "lora.alpha=2.0"
    without, adapted = (
        costs_of(load(SMALL, [f"train.remat={remat}", *more])).kinds["layer"]
        for more in ((), adapters)
    )
    assert adapted.for_b == without.for_b
    low = 0 if remat == "full" else 7 * 32 * 2 * 4
    assert adapted.for_w == without.for_w + low
