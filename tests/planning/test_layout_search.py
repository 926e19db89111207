"""`plan --search`: equal to brute force and above its bounds; `plan` says the same of its file."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from commands import SMALL
from msgspec import structs

from jaxpipe import config as configs
from jaxpipe.core.schedule import Costs, recompute_ahead, scan_buffers
from jaxpipe.core.schedule.lockstep import Lockstep
from jaxpipe.core.schedule.scan import scan_time
from jaxpipe.lab.search.bounds import ScheduleFacts, least_residuals, least_seconds
from jaxpipe.lab.search.layout_search import LayoutSearch
from jaxpipe.lab.search.result import SearchResult
from jaxpipe.lab.search.space import SearchSpace
from jaxpipe.lab.search.table import time_parts
from jaxpipe.plan import main
from jaxpipe.planning import Hardware, estimate
from jaxpipe.planning.cost.memory import layout_of, rank_bytes
from jaxpipe.planning.resolve import arrange, resolve
from jaxpipe.schedules import build

CONFIGS = Path(__file__).parents[2] / "configs"
ONE_SHAPE = ("train.microbatch_size=1", "train.remat=none", "train.offload_layers=0")
SPACES = {
    "schedules": (
        *ONE_SHAPE, "parallel.tp=1", "parallel.zero_stage=1", "train.offload_moments=false",
    ),
    "tp": ("parallel.schedule=1f1b", "parallel.in_flight=0", "parallel.pp=2",
           "train.offload_layers=0"),
    "experts": (
        *ONE_SHAPE, "parallel.schedule=1f1b", "parallel.tp=1", "model.n_experts=4",
        "model.experts_per_token=2", "model.d_expert=32", "model.first_dense_layers=1",
    ),
    "sequences": (*ONE_SHAPE, "parallel.schedule=zb_h1", "parallel.tp=1", "train.seq_len=4096"),
    "memory": ("parallel.schedule=1f1b", "parallel.tp=1", "parallel.vocab_parallel_pp=false",
               "train.microbatch_size=1"),
    "groups": ("train.remat=none", "train.offload_layers=0", "parallel.schedule=1f1b",
               "parallel.in_flight=0", "parallel.tp=1", "train.offload_moments=false"),
}  # fmt: skip
SLOW = Hardware(link=1e8, network=3e7)  # compute and messages take similar times


def search_of(overrides, memory, keep=3):
    """The search of a space on 4 devices, for `groups` of two hosts with fast links."""
    given = configs.load(SMALL, [*overrides, "train.compute_dtype=bfloat16"])
    fixed = [word.partition("=")[0] for word in overrides]
    hardware = replace(SLOW, link=1e10, per_host=2) if overrides == SPACES["groups"] else SLOW
    return LayoutSearch(SearchSpace(given, 4, fixed, hardware.per_host), hardware, memory, keep)


def values(found):
    return [(one.seconds, one.offloaded, one.bytes) for one in found]


@pytest.mark.extended
@pytest.mark.slow(unless=["tp", "memory", "groups"])
@pytest.mark.parametrize("name", SPACES)
def test_a_search_finds_what_brute_force_finds(name):
    least, _ = search_of(SPACES[name], 0).run().least
    for memory in (2.5 * least, 1e12):
        search = search_of(SPACES[name], memory)
        result = search.run()
        found = sorted(search.every(), reverse=True)
        every = list({one.layout: one for one in found}.values())
        assert values(result.best) == values(sorted(every)[:3])
        estimated = [one.estimate().seconds for one in result.best]
        assert estimated == pytest.approx([one.seconds for one in result.best])
    assert every
    if name == "groups":  # each group is a host, and sends only shards over the network
        assert 2 in {one.plan.config.parallel.dp_replicate for one in result.best}
    # "tp" has two layouts in all. Those of tiny models are close: launches take most of their time.
    assert result.simulated < len(found) or name not in ("schedules", "experts")


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "1f1b_v", "dualpipe"]
)
def test_no_schedule_is_below_its_bounds(name):
    random, config = Random(name), configs.load(SMALL, ["model.n_layers=8"])
    for microbatches in (4, 8, 16):
        pp = 2 if name == "dualpipe" else random.choice((2, 4))
        schedule = build(name, pp=pp, microbatches=microbatches)
        stages = schedule.stages
        facts = ScheduleFacts.of_schedule(schedule, in_order=True)
        for ticks in (1, 2):
            taken = [[random.random() for _ in range(stages)] for _ in range(3)]
            exchange = (
                Costs(*([t / 3 for t in of] for of in taken)) if random.random() < 0.5 else None
            )
            costs = Costs(*taken, transfer=random.random() / 10, exchange=exchange)
            lockstep = Lockstep(transfer_ticks=ticks)
            assert least_seconds(facts, costs) <= scan_time(schedule, costs, lockstep) * (1 + 1e-12)
            with_r = replace(costs, R=[random.random() for _ in range(stages)])
            ahead = recompute_ahead(schedule, with_r, lockstep)
            assert least_seconds(facts, with_r) <= scan_time(ahead[0], with_r, ahead[1]) * (
                1 + 1e-12
            )
            buffers, layout = scan_buffers(schedule, lockstep), layout_of(
                config, schedule.placement, (8 // stages,) * stages
            )  # fmt: skip
            without = rank_bytes(config, layout, None).total
            least = without + least_residuals(config, facts, layout)
            assert without < least <= rank_bytes(config, layout, buffers).total


@pytest.mark.extended
def test_no_step_is_faster_than_the_bounds_of_its_shape_and_schedule():
    """Also where layers are recomputed in part, gathered for every action, or run in halves."""
    search = search_of(("parallel.pp=2", "train.microbatch_size=2", "parallel.cp=1"), 1e12)
    shapes, every = list(search._bounded.shapes()), SearchResult([])
    found = 0
    for bound, number, shape in Random(0).sample(shapes, 4):
        schedules = list(search._bounded.schedules(shape, number, every))
        for least, position, scheduled in Random(1).sample(schedules, 3):
            fastest = search._fastest(scheduled, position, every)
            assert bound <= least * (1 + 1e-9)
            assert fastest is None or least <= fastest.seconds
            found += fastest is not None
    assert found > 4


def test_the_bound_of_1f1b_is_its_time_where_nothing_waits():
    schedule = build("1f1b", pp=4, microbatches=8)
    facts = ScheduleFacts.of_schedule(schedule, in_order=True)
    assert least_seconds(facts, Costs(*[(1.0,) * 4] * 3)) == 33


@pytest.mark.extended
def test_what_is_written_is_planned_alike(tmp_path, capsys):
    """And a fixed setting stays; parts add up; ties offload nothing."""
    file = tmp_path / "best.toml"
    words = [str(SMALL), "--search", "--devices", "4", "parallel.tp=2", "train.microbatch_size=1"]
    assert main([*words, "--json", "--write", str(file)]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    own = [one["settings"]["parallel"] for one in best]
    shown = {(one["pp"], one["dp"], one["cp"], one["schedule"]) for one in own}
    assert len(shown) == len(best) >= 8  # each mesh and schedule once
    seconds = [one["seconds"] for one in best]
    assert sorted(seconds) == pytest.approx(seconds, rel=1e-9)
    alone = [(one["dp"], one["cp"]) for one in own if one["pp"] == 1]
    assert len(set(alone)) == len(alone) > 0  # in one schedule
    assert all(one["settings"]["parallel"]["tp"] == 2 for one in best)
    assert best[0]["settings"]["train"]["offload_layers"] == 0
    assert all(sum(one["parts"].values()) == pytest.approx(one["seconds"]) for one in best)
    assert main([str(file), "--json"]) == 0
    own = next(one for one in json.loads(capsys.readouterr().out)["schedules"] if one["configured"])
    assert own["tokens_per_second"] == best[0]["tokens_per_second"]
    assert own["bytes"] == best[0]["bytes"]
    tokens = configs.load(SMALL).tokens_per_step
    assert configs.load(file).tokens_per_step == tokens


@pytest.mark.extended
def test_what_is_written_runs_without_a_loop_that_it_excludes(tmp_path):
    looped, file = tmp_path / "looped.toml", tmp_path / "best.toml"
    looped.write_text(SMALL.read_text().replace("[parallel]", "[parallel]\nunroll_layers = 1"))
    words = ["--search", "--devices", "2", "--device", "h100", "--write", str(file)]
    words += ["parallel.pp=2", "parallel.tp=1", "parallel.cp=1", "model.n_layers=8"]
    words += ["parallel.schedule=dualpipev", "train.microbatch_size=1", "train.remat=none"]
    in_order = "parallel.in_flight=0"  # in its ticks an F and a gradient run at once
    assert main([str(looped), *words, in_order]) == 0
    assert configs.load(file).parallel.unroll_layers == 0
    resolve(configs.load(file))
    assert main([str(looped), *words, "parallel.unroll_layers=1"]) == 0  # which is fixed
    assert configs.load(file).parallel.unroll_layers == 1
    resolve(configs.load(file))


def test_layers_of_a_tensor_parallel_group_are_within_a_host():
    """24 devices are three hosts of eight; the configuration's own tp may be another."""
    config = configs.load(SMALL, ["model.n_heads=12", "model.n_kv_heads=12", "model.d_model=48"])

    def tried(given, devices, per_host=8):
        space = SearchSpace(given, devices, per_host=per_host)
        return {mesh.parallel.tp for mesh in space.meshes()}

    assert tried(config, 24) == {1, 2, 4, 8}
    assert tried(config, 6) == {1, 2, 3, 6}
    assert tried(config, 24, per_host=4) == {1, 2, 4}
    own = structs.replace(config.parallel, tp=3)
    assert tried(structs.replace(config, parallel=own), 24) == {1, 2, 3, 4, 8}


def test_a_layer_split_that_is_fixed_stays():
    """Schedules with other numbers of stages are left out, and so are meshes without any."""

    def schedules_of(split):
        config = configs.load(SMALL, [f"parallel.layer_split={split}", "model.n_layers=8"])
        space = SearchSpace(config, 4, ["parallel.layer_split", "train.offload_layers"])
        shapes = (shape for mesh in space.meshes() for shape in space.shapes(mesh))
        return space, [one.parallel for shape in shapes for one in space.schedules(shape)]

    _, found = schedules_of([1, 2, 3, 2])
    assert {one.layer_split for one in found} == {(1, 2, 3, 2)}
    assert {one.pp for one in found} >= {2, 4}
    space, found = schedules_of([1, 1, 1, 1, 4])
    assert not [one for one in found if one.pp > 1]
    assert "has the 5 stages of parallel.layer_split=[1, 1, 1, 1, 4]" in " ".join(space.refusals)


def test_parts_say_what_they_are_for():
    config = configs.load(SMALL, ["parallel.tp=2", "parallel.dp=1", "parallel.pp=2"])
    plan = arrange(config)
    one = estimate(plan)
    parts = time_parts(one)
    assert parts["tp"] > 0 < parts["messages"]
    free = replace(one, report=replace(one.report, scan_makespan=0.0))
    assert free.seconds == one.update + one.mirroring


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--devices", "4", "--memory", "10kB", "parallel.tp=1"], "nothing fits the 0.0 GiB"),
        (["--devices", "7", "parallel.tp=2"], "1f1b, parallel.tp=2, train.remat=full: pp x dp"),
        (["--devices", "4,8"], "--search needs one number of devices"),
        (
            ["--devices", "4", "train.batch_tokens=512", "train.grad_accum_steps=2"],
            "give one of them",
        ),
        (["--devices", "4", "--write", "x.csv"], "a name that ends in .toml"),
        (["--devices", "4", "parallel.costs=measure"], "measured seconds are of one mesh"),
        (["--devices", "4", "--timeline"], "--timeline with --search"),
        (["--devices", "4", "--check-gpu", "b200"], "a search is for one device"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(words, sentence, capsys):
    assert main([str(SMALL), "--search", *words, "train.remat=full", "parallel.schedule=1f1b"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert sentence in said[-1]
    assert all(line.startswith("search: ") for line in said[:-1])  # progress, on a slow machine


@pytest.mark.parametrize("tokens", [512, 1024])
def test_a_batch_of_the_command_line_replaces_that_of_the_file(tokens, capsys):
    words = ["parallel.schedule=1f1b", "parallel.pp=2", "parallel.tp=1", "train.microbatch_size=1"]
    words += ["parallel.zero_stage=1", "train.remat=full", "train.offload_moments=false"]
    words += ["parallel.vocab_parallel_pp=false", f"train.batch_tokens={tokens}"]
    assert main([str(SMALL), "--search", "--devices", "2", "--json", *words]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["best"]
    train, length = best["settings"]["train"], configs.load(SMALL).train.seq_len
    assert train["grad_accum_steps"] * length == tokens
    assert not train["batch_tokens"]
    assert main([str(SMALL), "--search", "--devices", "2", *words]) == 0
    assert "not possible" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "devices", "card"),
    [
        ("llama3_70b_32gpu_tp4_pp4.toml", 32, "H200"),
        ("llama3_8b_pp4.toml", 8, "H100"),
        ("llama3_8b_16k_pp4.toml", 8, "H100"),
        ("qwen3_8b_pp2.toml", 8, "H100"),
    ],
)
def test_no_recipe_is_faster_than_what_a_search_finds(file, devices, card, capsys):
    where = ["--device", card, "--json"]
    assert main([str(CONFIGS / file), *where]) == 0
    own = next(one for one in json.loads(capsys.readouterr().out)["schedules"] if one["configured"])
    assert main([str(CONFIGS / file), "--search", "--devices", str(devices), *where]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert best["tokens_per_second"] >= own["tokens_per_second"]
