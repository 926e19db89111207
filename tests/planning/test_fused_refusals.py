"""What several steps in one program exclude (`train.fused_steps`)."""

from pathlib import Path

import msgspec
import pytest
from resolving import resolved

from jaxpipe.config import ConfigError, load
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.planning import Devices, arrange
from jaxpipe.planning.rules.fused import check_fused

BASE = Path(__file__).parents[1] / "data" / "base.toml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.tie_embeddings=true"], "with a head that is the embedding: the first"),
        (["parallel.vocab_parallel_pp=true"], "with parallel.vocab_parallel_pp=true: ranks that"),
        (["train.compute_dtype=float16"], "with train.compute_dtype='float16': its loss scale"),
        (["parallel.slices=2"], "with parallel.slices=2: slices of sequences do not overlap"),
        (
            ["parallel.zero_stage=3", "parallel.reshard_after_forward=true"],
            "with parallel.reshard_after_forward=true: ops gather what others have updated",
        ),
        (["optimizer.name=adafactor"], "with optimizer.name='adafactor': a rank updates element"),
        (
            ["parallel.schedule=dualpipe", "log.bubble_every=4"],
            "with log.bubble_every=4: its steps are one after the other",
        ),
    ],
)
def test_validate_rejects_steps_in_one_program(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(load(BASE, ["train.fused_steps=4", *overrides]), count=2)
    assert "\n" not in str(caught.value)


def test_steps_in_one_program_exclude_a_layer_that_predicts_further_tokens():
    model = DeepseekConfig(
        family="deepseek", n_layers=3, d_model=32, n_heads=2, d_ff=32, vocab_size=32, mtp_depth=1,
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    config = msgspec.structs.replace(load(BASE, ["train.fused_steps=4"]), model=model)
    with pytest.raises(ConfigError, match="train.fused_steps=4 with model.mtp_depth=1: ranks"):
        check_fused(config)


def test_a_vocabulary_is_not_shared_by_steps_in_one_program():
    """With "auto". The head of a GPT-2 is always its embedding."""
    config = load(BASE, ["train.fused_steps=4"])
    assert arrange(config, Devices()).config.parallel.vocab_parallel_pp is False
    assert GPT2Config(n_layers=1, d_model=8, n_heads=1, d_ff=8, vocab_size=8).tied
