"""The mesh of a run that has lost devices (`runtime.min_devices`)."""

from dataclasses import replace

import pytest
from commands import SMALL

from jaxpipe.config import ConfigError, load
from jaxpipe.planning import Devices, resolve_on_fewer
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.runtime.environment import usable_share


def on_fewer(count, *overrides, **described):
    """Return the plan on `count` devices, and the sentence; small.toml has pp=4 x dp=2, M=4."""
    config = load(SMALL, ["runtime.min_devices=1", *overrides])
    check_settings(config)
    return resolve_on_fewer(config, replace(Devices.planned(config), count=count, **described))


def mesh_of(plan):
    return plan.config.parallel.pp, plan.config.parallel.dp, plan.config.train.grad_accum_steps


@pytest.mark.parametrize(
    ("count", "overrides", "mesh"),
    [
        (8, [], (4, 2, 4)),
        (6, [], (4, 1, 8)),  # a smaller dp comes first, though pp=3 would use all
        (6, ["runtime.min_devices=5"], (3, 2, 4)),
        (3, [], (3, 1, 8)),
        (1, ["parallel.vocab_parallel_pp=false"], (1, 1, 8)),
        (7, ["parallel.pp=1", "parallel.dp=8"], (1, 4, 8)),  # 7, 6 and 5 do not divide 32
        (7, ["parallel.pp=1", "parallel.dp=8", "train.grad_accum_steps=3"], (1, 6, 4)),
        (7, ["parallel.pp=1", "parallel.dp=8", "runtime.min_devices=5"], (3, 2, 16)),
        (6, ["parallel.pp=2", "parallel.tp=2"], (2, 1, 8)),
        (7, ["parallel.pp=1", "parallel.dp=8", "parallel.cp=2"], (1, 4, 8)),
        (3, ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.dp=2"], (2, 1, 8)),
        # interleaved_1f1b with two stages a rank needs the four layers of pp=2
        (3, ["parallel.schedule=interleaved_1f1b", "parallel.pp=2", "parallel.dp=4",
             "train.grad_accum_steps=8", "runtime.min_devices=3"], None),
    ],
)  # fmt: skip
def test_the_mesh_of_the_devices_that_are_left(count, overrides, mesh):
    if mesh is None:
        with pytest.raises(ConfigError, match="no mesh of at least runtime.min_devices=3"):
            on_fewer(count, *overrides)
        return
    plan, sentence = on_fewer(count, *overrides)
    assert mesh_of(plan) == mesh
    parallel = plan.config.parallel
    assert plan.devices.count == parallel.devices <= count
    assert plan.config.tokens_per_step == load(SMALL, overrides).tokens_per_step
    assert bool(sentence) == (count < load(SMALL, overrides).parallel.devices)


def test_the_sentence_names_what_changed():
    _, sentence = on_fewer(7, "parallel.dp=4", "parallel.dp_replicate=4")
    assert sentence == (
        "7 of 16 devices are left (runtime.min_devices=1): parallel.dp=1 instead of 4, "
        "parallel.dp_replicate=1 instead of 4, train.grad_accum_steps=16 instead of 4; a step "
        "keeps its 512 tokens; unused devices: 3"
    )


def test_tokens_of_a_step_stay_where_they_are_given():
    given = ["train.grad_accum_steps=0", "train.batch_tokens=256"]
    assert mesh_of(on_fewer(4, *given)[0]) == (4, 1, 8)


def test_groups_of_replicas_keep_their_size():
    plan, _ = on_fewer(6, "parallel.pp=1", "parallel.dp=8", "parallel.dp_replicate=4",
                       "train.grad_accum_steps=3")  # fmt: skip
    assert (plan.config.parallel.dp, plan.config.parallel.dp_replicate) == (6, 3)


def test_a_mesh_takes_whole_processes():
    assert mesh_of(on_fewer(6, "runtime.min_devices=3", per_process=3)[0]) == (3, 2, 4)


def test_a_mesh_fits_the_memory_of_a_device():
    """Activations of three pipeline ranks take more than the layers of two."""
    needed = {pp: on_fewer(pp)[0].memory.total for pp in (2, 3)}
    assert needed[2] < needed[3]
    between = (needed[2] + needed[3]) / 2 / usable_share()
    assert mesh_of(on_fewer(3, memory=between)[0]) == (2, 1, 8)
    with pytest.raises(ConfigError, match=r"pp=3 dp=1 tp=1 needs .* KiB of a device, which has"):
        on_fewer(3, "runtime.min_devices=3", memory=between)


@pytest.mark.parametrize(
    ("count", "overrides", "sentence"),
    [
        (3, ["runtime.min_devices=4"],
         "= 8 must equal the number of devices, 3, which may fall to runtime.min_devices=4"),
        (9, [], "= 8 must equal the number of devices, 9"),
        (7, ["runtime.min_devices=0"], "= 8 must equal the number of devices, 7: change"),
        (7, ["parallel.pp=1", "parallel.dp=8", "parallel.cp=8", "runtime.min_devices=5"],
         r"^7 of the 8 devices of pp=1 dp=8 cp=8 \(gather\) tp=1 are left, and no mesh of at least "
         r"runtime.min_devices=5 of them has the same 128 tokens in a step \(.* "
         r"x parallel.cp=8.*\): start more processes, lower runtime.min_devices, or"),
        (8, ["runtime.min_devices=9"], "min_devices=9 must be at most parallel.pp=4 x "),
        (8, ["parallel.dp=-1"], "min_devices=1 excludes parallel.dp=-1: -1 takes any"),
    ],
)  # fmt: skip
def test_refusals(count, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        on_fewer(count, *overrides)


@pytest.mark.parametrize(
    ("processes", "remedy"),
    [
        (2, "set runtime.cpu_devices=4 to train .* in each of 2 processes"),
        (3, "change one of them"),
    ],
)
def test_virtual_devices_of_several_processes(processes, remedy, monkeypatch):
    """Of three processes, none can have the third of eight devices."""
    places = {"COORDINATOR_ADDRESS": "host:1", "NUM_PROCESSES": processes, "PROCESS_ID": 0}
    for name, value in places.items():
        monkeypatch.setenv(f"JAX_{name}", str(value))
    message = rf"= 8 must equal the number of devices, {8 * processes}: .*{remedy}\.$"
    with pytest.raises(ConfigError, match=message):
        check_settings(load(SMALL, ["runtime.cpu_devices=8"]))


def test_virtual_devices_may_be_fewer():
    check_settings(load(SMALL, ["runtime.min_devices=4", "runtime.cpu_devices=4"]))
    with pytest.raises(ConfigError, match="number of devices, 3, which may fall to"):
        check_settings(load(SMALL, ["runtime.min_devices=4", "runtime.cpu_devices=3"]))
