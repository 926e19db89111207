"""Mixtures of experts under every schedule and mesh, against a one-hot reference on one device."""

import sys

import numpy as np
import pytest
from compare import assert_same
from kernels import TOKAMAX
from mixtures import EXAMPLES, LENGTH, MICROBATCHES, held, problem, run

from jaxpipe.core.schedule import Lockstep
from jaxpipe.model.layers.moe.products import multiply_by_kernel

PAIRED = Lockstep(transfer_ticks=1, pairs=True)
TOKENS = MICROBATCHES * EXAMPLES * LENGTH
CASES = [
    ("qwen", "gpipe", (2, 4, 1, 4), {}),
    ("deepseek", "1f1b", (2, 2, 2, 2), {"remat": "selective"}),
    ("switch", "interleaved_1f1b", (2, 2, 2, 2), {"sequence": True, "zero_stage": 1}),
    ("deepseek", "zb_h1", (4, 2, 1, 2), {"remat": "full", "zero_stage": 2}),
    ("qwen", "zbv", (2, 2, 2, 1), {"sequence": True}),
    # as on GPUs, an F and a gradient in one branch, in rounds
    ("narrow", "dualpipe", (2, 4, 1, 2), {"zero_stage": 1, "lockstep": PAIRED}),
    (
        "deepseek",
        "dualpipev",
        (2, 4, 1, 2),
        {"zero_stage": 3, "reshard_after_forward": True, "lockstep": PAIRED},
    ),
    ("deepseek", "1f1b", (2, 2, 1, 2), {"slices": 2, "routed": True}),
    # replicas that share sequences; all tokens to one expert; recorded routes
    ("qwen", "1f1b", (2, 2), {"cp": 2, "remat": "full"}),
    ("qwen", "1f1b", (2, 4, 1, 4), {"cp": 4, "heads": 1, "zero_stage": 2}),
    ("deepseek", "zb_h1", (2, 4, 1, 4), {"cp": 2, "heads": 2, "remat": "full"}),
    ("qwen", "1f1b", (1, 4, 2, 2), {"cp": 4, "sequence": True}),
    ("one", "zb_h1", (2, 2, 1, 2), {"crowded": True}),
    # the experts of a layer that predicts further tokens
    ("ahead", "zb_h1", (2, 2, 2, 2), {"sequence": True, "zero_stage": 2, "remat": "full"}),
    ("ahead", "dualpipe", (2, 4, 1, 2), {"cp": 2, "lockstep": PAIRED}),
    ("deepseek", "zb_h1", (2, 2, 1, 2), {"routed": True, "remat": "full"}),
    # as on GPUs, the first F gathers parameters, and the last gradient reduces sums
    ("deepseek", "1f1b", (2, 2, 2, 2), {"zero_stage": 1, "overlap_sums": True}),
]


@pytest.mark.extended(unless=["deepseek-1f1b-*"])
@pytest.mark.slow(unless=["deepseek-1f1b-mesh1-*", "narrow-dualpipe-*"])
@pytest.mark.parametrize(("model", "name", "mesh", "how"), CASES)
def test_every_schedule_agrees_with_the_reference(model, name, mesh, how):
    got, want = run(model, name, *mesh, poison_bubbles=True, **how)
    assert_same(got, want)
    counts = np.asarray(got.aux.sums["expert_counts"])
    assert (counts.sum(1) % TOKENS == 0).all()
    assert (counts.sum(1) > 0).all()
    dropped = np.asarray(got.aux.sums["expert_rows_dropped"])
    assert (dropped > 0).all() == (model in ("switch", "narrow"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "mesh", "how"),
    [
        ("deepseek", "zb_h1", (2, 2, 1, 2), {"padding": "real", "remat": "full"}),
        ("switch", "1f1b", (2, 2, 1, 2), {"padding": "packed"}),
        ("narrow", "dualpipe", (2, 4, 1, 2), {"padding": "real", "lockstep": PAIRED}),
        ("qwen", "interleaved_1f1b", (2, 2, 2, 2), {"padding": "packed", "sequence": True}),
        ("qwen", "1f1b", (2, 2), {"padding": "real", "cp": 2, "remat": "selective"}),
        ("one", "1f1b", (2, 2, 1, 2), {"padding": "real", "slices": 2}),
    ],
)
def test_experts_take_no_padding(model, name, mesh, how):
    """Loss, gradients, counts and drops are those of the real tokens alone."""
    got, want = run(model, name, *mesh, poison_bubbles=True, **how)
    assert_same(got, want)
    config = problem(model)[0].config
    tokens = got.aux.sums["expert_counts"].sum(1) / config.experts_per_token
    assert (tokens == held().sum()).all()


WHOLE = [
    ("qwen", "1f1b", (1, 1, 2, 1), {}),
    ("deepseek", "1f1b", (2, 2, 2, 2), {"remat": "selective"}),
    ("deepseek", "zb_h1", (2, 2, 2, 2), {"remat": "full", "zero_stage": 2}),
    ("qwen", "zbv", (2, 2, 2, 1), {"zero_stage": 1}),
    ("qwen", "dualpipev", (2, 2, 2, 2), {"remat": "full", "lockstep": PAIRED}),
    ("qwen", "zbv", (2, 2, 2, 2), {"remat": "full", "zero_stage": 3}),
    ("roomy", "dualpipev", (2, 2, 2, 1), {"lockstep": PAIRED}),
    ("qwen", "1f1b", (2, 2, 2, 2), {"padding": "packed", "remat": "full"}),
    ("deepseek", "zb_h1", (2, 2, 2, 1), {"padding": "real"}),
    ("deepseek", "1f1b", (1, 4, 2, 2), {"cp": 2, "remat": "full", "zero_stage": 2}),
    ("qwen", "zb_h1", (2, 2, 2, 2), {"cp": 2, "heads": 1}),
    ("deepseek", "1f1b", (2, 2, 2, 2), {"slices": 2, "routed": True}),
    ("ahead", "zb_h1", (2, 2, 2, 2), {"remat": "full"}),
    ("qwen", "zb_h1", (2, 2, 2, 2), {"overlap_halves": "rows"}),
    ("one", "1f1b", (2, 2, 2, 2), {"crowded": True}),
]


@pytest.mark.extended
@pytest.mark.slow(unless=["qwen-1f1b-mesh0-*"])
@pytest.mark.parametrize(("model", "name", "mesh", "how"), WHOLE)
def test_devices_along_tp_route_their_own_tokens_to_whole_experts(model, name, mesh, how):
    got, want = run(model, name, *mesh, over_tp=True, poison_bubbles=True, **how)
    assert_same(got, want)
    assert not np.asarray(got.aux.sums["expert_rows_dropped"]).any()


BY_HOST = [
    ("qwen", "1f1b", (1, 4, 1, 4), {}),
    ("deepseek", "zb_h1", (2, 4, 1, 4), {"remat": "full", "zero_stage": 2}),
    ("deepseek", "1f1b", (2, 2, 2, 2), {"over_tp": True, "remat": "selective"}),
    ("qwen", "dualpipev", (2, 4, 1, 4), {"lockstep": PAIRED}),
    ("qwen", "zbv", (2, 4, 1, 4), {"padding": "packed"}),
    ("deepseek", "1f1b", (2, 4, 1, 4), {"cp": 2, "heads": 1, "routed": True}),
    ("one", "zb_h1", (2, 4, 1, 4), {"crowded": True}),
]


@pytest.mark.extended
@pytest.mark.slow(unless=["qwen-1f1b-mesh0-*"])
@pytest.mark.parametrize(("model", "name", "mesh", "how"), BY_HOST)
def test_a_token_is_sent_to_each_host_once(model, name, mesh, how):
    """Two hosts, of two of the devices that share the experts each."""
    got, want = run(model, name, *mesh, per_host=2, poison_bubbles=True, **how)
    assert_same(got, want)
    assert not np.asarray(got.aux.sums["expert_rows_dropped"]).any()


@pytest.mark.slow
@pytest.mark.parametrize(("room", "lost"), [(1.0, 3 / 4), (2.0, 1 / 2), (4.0, 0)])
def test_what_buffers_of_hosts_have_no_room_for_is_counted(room, lost):
    """All tokens go to one device of the first host; half of them is the mean of a host."""
    got, _ = run("one", "1f1b", 2, 4, 1, 4, crowded=True, room=room, per_host=2)
    assert got.aux.sums["expert_rows_dropped"].tolist() == [TOKENS * lost] * 4


@pytest.mark.slow
def test_the_kernel_of_gpus_agrees_with_the_reference(monkeypatch):
    """A stand-in keeps uninitialized rows of no group, and buffers are half empty."""
    monkeypatch.setitem(sys.modules, "tokamax", TOKAMAX)
    how = {"remat": "selective", "product": multiply_by_kernel, "poison_bubbles": True}
    assert_same(*run("qwen", "zb_h1", 2, 2, 1, 2, **how))


@pytest.mark.slow
def test_what_buffers_have_no_room_for_is_counted():
    """All tokens go to one device, whose buffer has space for half of each device's."""
    got, _ = run("one", "1f1b", 2, 2, 1, 2, crowded=True, room=1.0)
    assert got.aux.sums["expert_rows_dropped"].tolist() == [TOKENS // 2] * 4
    assert np.isfinite(got.losses).all()
