"""Row lengths must be divisible by all that shards or slices them; rules of packing."""

from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe.config import ConfigError, load

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
LONG = ["train.seq_len=4096", "train.variable_length=true"]


def loaded(*overrides):
    return load(SMALL, [*LONG, *overrides])


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], {1: 1024, 1024: 1024, 1025: 2048, 4000: 4096}),
        (["train.seq_len=1500"], {1: 1024, 1025: 1500}),
        (["train.length_bucket=0"], {1: 128, 129: 256, 4090: 4096}),
        (["parallel.slices=4", "train.length_bucket=0"], {1: 512, 513: 1024}),
        (["train.variable_length=false"], {1: 4096}),
    ],
    ids=str,
)
def test_lengths_of_steps(overrides, lengths):
    config = loaded(*overrides)
    resolved(config)
    assert {longest: config.length_of(longest) for longest in lengths} == lengths


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.length_bucket=1000"], r"length_bucket=1000 must be .*pad_to_multiple_of=128: e"),
        (["parallel.slices=16"], r"=1024 must be a multiple of .*=128 x parallel\.slices=16: e"),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "train.length_bucket=128"],
            r"=128 must be a multiple of .* x parallel\.tp=2: every equal part",
        ),
        (
            ["train.pad_to_multiple_of=1", "train.loss_chunks=4"],
            r"train\.loss_chunks=4 must divide train\.pad_to_multiple_of=1 with",
        ),
        (
            ["data.balance_rows=8", "data.packing=sequential", "data.shuffle=false"],
            r"data\.balance_rows=8 with data\.shuffle=false: rows of .*; shuffle, or leave bal",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolved(loaded(*overrides))
