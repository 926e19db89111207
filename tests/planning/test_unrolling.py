"""`parallel.unroll_layers`: which layers a loop repeats, and where a loop is refused."""

from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe.config import ConfigError, load

BASE = Path(__file__).parents[1] / "data" / "base.toml"
GPU = {"platform": "cuda"}


def plan_of(*overrides, **described):
    more = ("parallel.pp=2", "parallel.dp=1", "train.grad_accum_steps=8")
    return resolved(load(BASE, [*more, *overrides]), **described)


@pytest.mark.parametrize(
    ("overrides", "unrolled"),
    [
        ((), 4),
        (("parallel.dp=2",), None),  # no CPU devices
        (("parallel.tp=2",), None),
        (("train.fp8=delayed", "train.compute_dtype=bfloat16"), None),
        (("train.fp8=delayed", "train.compute_dtype=bfloat16", "runtime.cpu_devices=2"), 4),
        (("runtime.cpu_devices=2",), 4),
        (("parallel.unroll_layers=1",), 1),
        (("optimizer.name=muon",), 4),
        (("optimizer.name=adafactor",), None),
        (("train.offload_layers=1",), None),
        (("optimizer.name=adafactor", "parallel.unroll_layers=64"), None),  # as many as there are
    ],
)
def test_how_many_are_unrolled(overrides, unrolled):
    assert plan_of(*overrides).unroll_layers == unrolled


def test_pairs_have_no_loop():
    """On CPU dualpipe pairs nothing."""
    dualpipe = ("parallel.schedule=dualpipe", "parallel.unroll_layers=1")
    assert plan_of(*dualpipe, "runtime.cpu_devices=2").unroll_layers == 1
    assert plan_of(dualpipe[0], **GPU).unroll_layers is None


def test_pairs_exclude_halves():
    """On CPU dualpipe pairs nothing."""
    halves = ("parallel.overlap_halves=true", "parallel.tp=2", "train.microbatch_size=2")
    overrides = (*halves, "parallel.schedule=dualpipe")
    assert plan_of(*overrides, "runtime.cpu_devices=4").config.parallel.overlap_halves
    with pytest.raises(ConfigError, match="overlap_halves=true with .*='dualpipe': this schedule"):
        plan_of(*overrides, **GPU)


@pytest.mark.parametrize(
    ("overrides", "described", "reason"),
    [
        (("optimizer.name=adafactor",), {}, "optimizer.name='adafactor' would not update"),
        (("train.offload_layers=1",), {}, "the copies of train.offload_layers=1 overlap"),
        (("parallel.schedule=dualpipe",), GPU, "parallel.schedule='dualpipe' pairs the layers"),
    ],
)
def test_a_loop_is_refused(overrides, described, reason):
    with pytest.raises(ConfigError, match=f"parallel.unroll_layers=1 makes a loop of .*{reason}"):
        plan_of(*overrides, "parallel.unroll_layers=1", **described)
