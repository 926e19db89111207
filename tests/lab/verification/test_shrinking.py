"""A smaller run keeps the loops over layers and the partial offloading of the run."""

from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.lab.verification.shrinking import shrink
from jaxpipe.lab.verification.smaller_loops import SmallerLoops, longest_loops
from jaxpipe.planning import Devices, resolve
from jaxpipe.planning.rules.across import check_settings

CONFIGS = Path(__file__).parents[3] / "configs"
ALONE = ("parallel.pp=1", "parallel.dp=1", "runtime.cpu_devices=1")
LOOPS = {
    "one stage": ("quickstart", (*ALONE, "model.n_layers=8"), {"layer": 3}, 1),
    "stages": ("quickstart", ("model.n_layers=32",), {"layer": 3}, 1),
    "two layers an iteration": ("qwen3_30b_a3b_pp2_ep4", (), {"sparse": 5}, 2),
    "a list": (
        "quickstart", ("model.n_layers=32", "parallel.layer_split=[1,10,12,9]"), {"layer": 3}, 1,
    ),
    "embedding and head alone": (
        "quickstart", ("model.n_layers=32", "parallel.layer_split=[0,16,16,0]"), {"layer": 4}, 1,
    ),
    "own numbers": (
        "quickstart", ("model.n_layers=29", "parallel.first_stage_layers=2"), {"layer": 3}, 1,
    ),
    "patterns": (
        "quickstart",
        (*ALONE, "model.family=gemma3", "model.sliding_window=16", "model.n_layers=12"),
        {"local_layer": 3}, 1,
    ),
    "kinds in turn": (
        "quickstart_deepseek", ("model.n_layers=23", "parallel.schedule=1f1b"), {"sparse": 3}, 1,
    ),
    "more dense layers": (
        "quickstart_deepseek",
        ("model.n_layers=23", "parallel.schedule=1f1b", "model.first_dense_layers=5"),
        {"layer": 3, "sparse": 3}, 1,
    ),
    "none, as few layers are unrolled": ("quickstart", ("model.n_layers=16",), {}, 0),
    "none, as all layers are unrolled": (
        "quickstart", ("model.n_layers=16", "parallel.unroll_layers=4"), {}, 4,
    ),
    "none, as layers have collectives": ("llama3_8b_pp4", (), {}, 0),
}  # fmt: skip


def shrunk(name, *overrides):
    config = configs.load(str(CONFIGS / f"{name}.toml"), overrides)
    check_settings(config)
    smaller = shrink(config)
    check_settings(smaller.config)
    return smaller, resolve(smaller.config, Devices.planned(smaller.config))


@pytest.mark.parametrize(("name", "overrides", "loops", "unroll"), LOOPS.values(), ids=LOOPS)
def test_loops_over_layers_stay(name, overrides, loops, unroll):
    smaller, plan = shrunk(name, *overrides)
    assert longest_loops(plan) == loops
    assert smaller.config.parallel.unroll_layers == unroll
    assert [what for what in smaller.unchecked if "loop" in what] == []


def test_iterations_of_several_layers_are_not_checked_with_many_stages():
    smaller, plan = shrunk("quickstart", "model.n_layers=32", "parallel.unroll_layers=2")
    assert longest_loops(plan) == {"layer": 3}
    assert "parallel.unroll_layers: 1 instead of 2" in smaller.changes
    (what,) = smaller.unchecked
    assert what.startswith("loops with parallel.unroll_layers=2 layers per iteration")


def test_a_loop_that_is_too_short_is_not_checked():
    plan = shrunk("quickstart", "model.n_layers=32")[1]
    loops = SmallerLoops({"layer": 3, "sparse": 3}, 1, 0)
    assert loops.lost_kinds(plan) == ["sparse"]
    (what,) = loops.unchecked(plan)
    assert what.startswith("the loop over layers of kind 'sparse'")


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.schedule=zb_auto", "parallel.memory_limit=1p"),
        ("parallel.layer_split=[3,5,5,3]",),
        ("parallel.layer_split=weighted",),
        ("parallel.first_stage_layers=2", "parallel.last_stage_layers=2"),
    ],
    ids=["limited", "a list", "weighted", "own numbers"],
)
def test_partial_offloading_stays_partial(overrides):
    smaller, plan = shrunk(
        "quickstart", "model.n_layers=16", "train.offload_layers=1", *overrides
    )  # fmt: skip
    assert smaller.config.train.offload_layers == 1
    assert min(plan.layers) >= 2


@pytest.mark.parametrize("overrides", [(), ("parallel.unroll_layers=1",)], ids=["", "in loops"])
def test_some_layers_stay_rematerialised(overrides):
    smaller, plan = shrunk(
        "quickstart", "model.n_layers=16", "train.remat_layers=3", *overrides
    )  # fmt: skip
    assert smaller.config.train.remat_layers == 1
    assert min(plan.layers) >= 2


def test_full_offloading_stays_full():
    smaller, plan = shrunk("quickstart", "model.n_layers=16", "train.offload_layers=4")
    assert (smaller.config.train.offload_layers, set(plan.layers)) == (1, {1})


@pytest.mark.parametrize(
    ("split", "layers"),
    [
        (("parallel.layer_split=weighted", "model.n_layers=10"), (1, 2, 2, 1)),
        (
            (
                "parallel.pp=2", "parallel.dp=4", "parallel.first_stage_layers=3",
                "parallel.last_stage_layers=1", "model.n_layers=4",
            ),
            (1, 1),
        ),
    ],
    ids=["weighted", "all numbers given"],
)  # fmt: skip
def test_splits_leave_every_stage_a_layer(split, layers):
    assert shrunk("quickstart", *split)[1].layers == layers


@pytest.mark.parametrize(("rows", "halves"), [(4, "rows"), (3, "sequence"), (1, "sequence")])
def test_halves_stay(rows, halves):
    overrides = ("parallel.overlap_halves=true", f"train.microbatch_size={rows}")
    config = shrunk("llama3_70b_32gpu_tp4_pp4", *overrides)[0].config
    assert (config.halves, config.parallel.tp) == (halves, 2)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (("parallel.ep=16", "parallel.ep_per_host=8"), (4, False, 2)),
        (("parallel.ep=16", "parallel.tp=2", "parallel.sequence_parallel=true",
          "parallel.ep_over_tp=true"), (4, True, 1)),
    ],
)  # fmt: skip
def test_how_devices_share_experts_stays(overrides, kept):
    """Two hosts of two devices, or two replicas of two devices along tp."""
    smaller, _ = shrunk(
        "qwen3_30b_a3b_pp2_ep4", "model.capacity_factor=0.0", "parallel.dp=16", *overrides
    )
    parallel = smaller.config.parallel
    assert (parallel.ep, parallel.ep_over_tp, parallel.ep_per_host) == kept
