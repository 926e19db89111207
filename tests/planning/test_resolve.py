"""A run is resolved once, for the devices that are there."""

from importlib import import_module

import jax
import pytest
from commands import SMALL
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.planning import Devices, Hardware, analytic
from jaxpipe.planning.cost.machine import machine_of
from jaxpipe.runtime.devices import DEVICES

RESOLVE = import_module("jaxpipe.planning.resolve")  # the package has a function of this name
PIPELINE = ["parallel.pp=2", "parallel.dp=1"]


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which every call of `build` and `arrange` adds its function's name."""
    made = []

    def count(name):
        function = getattr(RESOLVE, name)

        def counted(*args, **options):
            made.append(name)
            return function(*args, **options)

        monkeypatch.setattr(RESOLVE, name, counted)

    count("build")
    count("arrange")
    RESOLVE._build.cache_clear()
    return made


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["1f1b", "zb_auto"])
def test_a_run_builds_its_schedule_once(schedule, tmp_path, calls):
    how = [f"run.dir={tmp_path}", f"parallel.schedule={schedule}", "train.steps=1"]
    assert train.main([str(SMALL), *how]) == 0
    assert calls == ["arrange", "build"]


@pytest.mark.extended
def test_on_gpus_auto_compares_two_layouts_of_one_order(calls):
    """A searched schedule is searched again, for the costs of the layout that won."""
    for schedule, builds in (("1f1b", 1), ("zbv", 2)):
        calls.clear()
        how = [*PIPELINE, f"parallel.schedule={schedule}", "parallel.vocab_parallel_pp=auto"]
        plan = resolved(configs.load(SMALL, how))
        assert isinstance(plan.config.parallel.vocab_parallel_pp, bool)
        assert (calls.count("arrange"), calls.count("build")) == (2, builds)


def test_costs_and_memory_are_of_the_devices_that_are_there():
    class Gpu:
        platform = "gpu"
        compute_capability = "8.0"

        def __init__(self, kind):
            self.device_kind = kind

    config = configs.load(SMALL, PIPELINE)
    for kind, name, memory in (
        ("NVIDIA A100-SXM4-80GB", "A100", DEVICES["A100"].memory),
        ("NVIDIA A100-SXM4-40GB", "A100", 40 << 30),
        ("NVIDIA GH200 480GB", "GH200", 96e9),
        ("NVIDIA H200", "H200", DEVICES["H200"].memory),
        ("Unknown", "H100", None),
    ):
        devices = Devices.present([Gpu(kind)] * 2)
        plan = RESOLVE.resolve(config, devices)
        assert (devices.count, devices.capability, plan.devices.memory) == (2, 8.0, memory)
        assert plan.seconds == analytic(plan.config, machine_of(name))
    here = Devices.present(jax.devices())
    assert (here.on_cpu, here.count, here.memory, here.hardware) == (True, 8, None, Hardware())
    assert Devices.planned(config).memory == DEVICES["H100"].memory


def test_a_plan_is_one_run():
    """Its parts belong together: layers of its stages, tables of its order, bytes of its tables."""
    plan = resolved(configs.load(SMALL, [*PIPELINE, "parallel.schedule=zb_h1"]), platform="cpu")
    assert sum(plan.layers) == plan.config.model.n_layers
    assert plan.layout.layers_per_stage == plan.layers
    assert plan.tables.lockstep == plan.lockstep
    assert len(plan.costs.F) == plan.schedule.stages
    assert plan.memory.total > plan.memory.parameters > 0
