"""`parallel.layer_split = "balanced"`: against brute force, within memory, and as a run has it."""

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest
from commands import SMALL
from resolving import resolved
from training_runs import train_on_random_tokens

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.schedule import Placement, ScheduleError, assign_layers
from jaxpipe.planning import Hardware, arrange
from jaxpipe.planning.balance import layer_seconds
from jaxpipe.planning.cost import card
from jaxpipe.planning.cost.compute import seconds_by_kind
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.schedules import balance_layers
from jaxpipe.schedules.search.balance import shorter_and_shorter
from jaxpipe.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"
PLACEMENTS = {
    "loop": Placement.loop(3),
    "interleaved": Placement.loop(2, 3),
    "v": Placement.v_shape(3),
    "both ways": Placement((0, 1, 2, 3), mirrored_from=2),
    "both ways, with a middle": Placement((0, 1, 2), mirrored_from=2),
    "any": Placement((1, 0, 0, 1, 1)),
}
MIXED = [
    "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=32",
    "model.first_dense_layers=1", "model.vocab_size=32768", "parallel.pp=2", "parallel.dp=1",
]  # fmt: skip
BALANCED = "parallel.layer_split=balanced"
PRESETS = {
    "gemma3_12b": (
        "llama3_8b_pp4.toml", "model.preset=gemma3_12b", "model.attention=cudnn",
        "train.seq_len=8192", "train.remat=full",
    ),
    "gpt_oss_20b": ("gpt_oss_20b_pp2_ep4.toml",),
    "deepseek_v3": ("deepseek_v3_2048gpu.toml",),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _launches_take_no_time(monkeypatch):
    """Models this small would take as long as their launches, and a head no longer than a layer."""
    own = card.card_of("H100")
    free = replace(own, rates=replace(own.rates, launch=0.0))
    monkeypatch.setattr("jaxpipe.planning.cost.machine.card_of", lambda *_: free)


def every_split(layers, stages):
    """All splits of layers over stages."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *cuts, layers)))


def sums_of(values, counts):
    """The sum over the layers of each stage."""
    return [sum(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def objective(costs, placement, counts):
    """The work of the busiest rank, for all microbatches, and the largest stage."""
    stages, work = sums_of(costs, counts), [0] * placement.pp
    for stage, rank in enumerate(placement.rank_of):
        work[rank] += stages[stage]
        if placement.mirrored_from is not None:
            work[placement.pp - 1 - rank] += stages[stage]
    return max(work), max(stages)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_split_is_better(name):
    placement, random = PLACEMENTS[name], Random(name)
    for round_ in range(25):
        layers = random.randint(placement.stages, 10)
        # Few different costs, as of kinds, make ties; dyadic fractions add without rounding.
        few, many = (1, 2, 5), [n / 64 for n in range(256)]
        costs = random.choices(few if round_ % 2 else many, k=layers)
        splits = every_split(layers, placement.stages)
        best = min(objective(costs, placement, counts) for counts in splits)
        assert objective(costs, placement, balance_layers(costs, placement)) == best, costs


@pytest.mark.parametrize("name", ["loop", "v"])
def test_no_split_within_a_bound_on_sizes_is_better(name):
    placement, random, shortened = PLACEMENTS[name], Random(name), 0
    for _ in range(10):
        layers = random.randint(placement.stages, 9)
        costs, sizes = random.choices((1, 2, 5), k=layers), random.choices((1, 3), k=layers)
        seen = list(shorter_and_shorter(costs, placement, sizes))
        largest = [max(sums_of(sizes, one)) for one in seen]
        assert largest == sorted(set(largest), reverse=True)
        shortened += len(seen) > 1
        for most, split in [(None, seen[0]), *((a - 1, s) for a, s in zip(largest, seen[1:]))]:
            best = min(
                objective(costs, placement, one)
                for one in every_split(layers, placement.stages)
                if most is None or max(sums_of(sizes, one)) <= most
            )
            assert objective(costs, placement, split) == best
        fits = [max(sums_of(sizes, one)) for one in every_split(layers, placement.stages)]
        assert largest[-1] == min(fits)
    assert shortened


def least_work(costs, pp):
    """The least work of the busiest of `pp` ranks with one stage each, by recursion over ranks."""
    sums = [0.0, *accumulate(costs)]
    best = sums
    for _ in range(pp - 1):
        best = [
            min((max(best[cut], sums[end] - sums[cut]) for cut in range(end)), default=0.0)
            for end in range(len(sums))
        ]
    return best[-1]


@pytest.mark.slow(unless=["gpt_oss_20b"])
@pytest.mark.parametrize("preset", PRESETS)
def test_published_models_have_the_least_work(preset):
    path, *overrides = PRESETS[preset]
    costs = layer_seconds(configs.load(CONFIGS / path, overrides), Hardware())
    for placement in (Placement.loop(4), Placement.v_shape(4), Placement.loop(4, 2)):
        work, even = (
            objective(costs, placement, counts)[0]
            for counts in (
                balance_layers(costs, placement),
                assign_layers(len(costs), placement.stages),
            )
        )
        assert work <= least_work(costs, 4) * 1.005  # of ranks that have a single stage
        v_shaped = placement == Placement.v_shape(4)
        assert even >= (1.0 if v_shaped and preset == "deepseek_v3" else 1.005) * work


def test_a_plan_has_concrete_counts():
    config = configs.load(SMALL, [*MIXED, BALANCED])
    plan = resolved(config, platform="cpu")
    assert plan.layers == plan.config.parallel.layer_split == (3, 1)
    seconds = layer_seconds(plan.config, plan.devices.hardware)
    assert plan.layers == balance_layers(seconds, plan.schedule.placement)
    dense, sparse, _, with_head = seconds
    head = with_head - sparse
    kinds = seconds_by_kind(plan.config, plan.devices.hardware).values()
    seconds = [kind.F + kind.B + kind.W for kind in kinds]
    assert sparse / dense == pytest.approx(seconds[1] / seconds[0])
    of_head = plan.devices.hardware.seconds(costs_of(plan.config).head)
    assert head / dense == pytest.approx(of_head / seconds[0])


def test_measurements_of_a_run_do_not_change_its_stages(tmp_path):
    config = configs.load(SMALL, [*MIXED, f"run.dir={tmp_path}", "parallel.costs=measure"])
    (tmp_path / "costs.json").write_text("{}")  # would be refused if it were read
    seconds = layer_seconds(config, Hardware())
    assert seconds == layer_seconds(configs.load(SMALL, MIXED), Hardware())


def kept(plan):
    """Bytes that 1F1B on two ranks keeps: of two microbatches, in the slots of every kind."""
    costs = costs_of(plan.config)
    kinds = [costs.kinds[kind] for kind in plan.layout.ring_slot_kinds]
    return 2 * sum(kind.for_b + kind.for_w for kind in kinds)


def test_a_memory_limit_shortens_the_largest_stage():
    uniform = [*MIXED[3:], "parallel.vocab_parallel_pp=false"]
    even, free = (arrange(configs.load(SMALL, [*uniform, *more])) for more in ([], [BALANCED]))
    assert (even.layers, free.layers) == ((2, 2), (3, 1))
    for limit, layers in ((kept(free), (3, 1)), (kept(free) - 1, (2, 2)), (kept(even), (2, 2))):
        config = configs.load(SMALL, [*uniform, BALANCED, f"parallel.memory_limit={limit}B"])
        assert arrange(config).layers == layers


def test_empty_layer_slots_count():
    """A dense and three sparse layers take a dense and two sparse slots, as (3, 1) and (2, 2)."""
    mixed = [*MIXED, "parallel.vocab_parallel_pp=false"]
    even, free = (arrange(configs.load(SMALL, [*mixed, *more])) for more in ([], [BALANCED]))
    assert (even.layers, free.layers) == ((2, 2), (3, 1))
    assert even.layout.slot_kinds == free.layout.slot_kinds
    config = configs.load(SMALL, [*mixed, BALANCED, f"parallel.memory_limit={kept(even) - 1}B"])
    with pytest.raises(ScheduleError, match="more than memory_limit"):
        arrange(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.first_stage_layers=1"],
            "first_stage_layers=1 excludes parallel.layer_split='balanced'",
        ),
        (
            ["parallel.last_stage_layers=1"],
            "last_stage_layers=1 excludes parallel.layer_split='balanced'",
        ),
        (["parallel.output_weight=2"], "with parallel.layer_split='weighted', .* is 'balanced'"),
        (
            ["parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=3"],
            "4 layers cannot fill 6 stages: every stage needs a layer",
        ),
        (["parallel.memory_limit=1B"], "memory_limit='1B'"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises((ConfigError, ScheduleError), match=message) as refused:
        resolved(configs.load(SMALL, [*MIXED, BALANCED, *overrides]))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_mixed_model_trains_as_with_even_stages():
    losses = {}
    for split in ("even", "balanced"):
        config = configs.load(SMALL, [*MIXED, f"parallel.layer_split={split}"])
        trainer = Trainer.resolve(config, tuple(jax.devices()[:2]))
        how = {"vocab_size": 32768, "shape": (4, 1, 33)}
        _, found = train_on_random_tokens(trainer, trainer.init(), range(3), **how)
        losses[trainer.plan.layers] = found
    assert losses.keys() == {(2, 2), (3, 1)}
    np.testing.assert_allclose(*losses.values(), rtol=1e-6)
