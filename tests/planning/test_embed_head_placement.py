"""`parallel.vocab_parallel_pp = "auto"`: how it is resolved, and where it does not apply."""

import json
from dataclasses import make_dataclass
from importlib import import_module

import jax
import pytest
from commands import SMALL
from msgspec.structs import replace
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.plan import main
from jaxpipe.planning import Devices, Hardware, analytic, arrange, estimates, op_seconds, write_own
from jaxpipe.schedules import FAMILIES
from jaxpipe.training.trainer import Trainer

# A vocabulary that costs as much as many layers: sharing it pays by far.
LARGE = ["parallel.pp=2", "parallel.dp=1", "model.vocab_size=131072", "model.d_model=256",
         "train.seq_len=256", "train.grad_accum_steps=8"]  # fmt: skip
LARGE += ["train.compute_dtype=bfloat16"]
EFFORT = 20_000  # of quick searches


@pytest.fixture(autouse=True)
def _quick_searches(monkeypatch):
    for module in ("candidates", "resolve"):
        monkeypatch.setattr(import_module(f"jaxpipe.planning.{module}"), "QUICK", EFFORT)


Gpu = make_dataclass("Gpu", ["platform", "device_kind"], frozen=True)


def large(*overrides):
    return configs.load(SMALL, [*LARGE, *overrides])


def shares(config, platform=None):
    devices = platform and Devices(platform)
    return arrange(config, devices, effort=EFFORT).config.parallel.vocab_parallel_pp


def estimated(config):
    """Return every schedule's estimate, by its name."""
    seconds = analytic(config, Hardware())
    found, _ = estimates(config, seconds)
    return {one.label: one for one in found}


def test_who_asks_is_told_alike():
    config = large()
    gpus = (Gpu("gpu", "NVIDIA H100"),) * 2
    assert shares(config) is True
    assert arrange(config).lockstep.vocab_parallel
    trainer = Trainer.resolve(config, gpus)
    assert trainer.config.parallel.vocab_shared_by == 2
    assert trainer.model.functions.embed_head_specs["embed"].sharded_axes >= {"pp"}
    for given in (True, False):
        parallel = replace(config.parallel, vocab_parallel_pp=given)
        assert shares(replace(config, parallel=parallel), "cpu") is given


@pytest.mark.extended
def test_every_schedule_has_the_better_ends():
    """In time, of which 1 % may be traded for memory; never slower than without "auto"."""
    either = {word: estimated(large(f"parallel.vocab_parallel_pp={word}", "parallel.pp=4",
                                    "model.n_layers=8"))
              for word in ("auto", "true", "false")}  # fmt: skip
    common = set.intersection(*map(set, either.values()))  # packed 1F1B has its own in_flight
    assert len(common) > 10
    met = set()
    for label in common:
        auto, shared, own = (found[label] for found in either.values())
        takes = auto.plan.lockstep.vocab_parallel
        met.add(takes)
        assert auto.seconds == (shared if takes else own).seconds
        assert auto.bytes == (shared if takes else own).bytes
        if not FAMILIES[auto.variant.family].is_searched:
            scans = [one.seconds - one.update for one in (shared, own)]
            assert takes == (scans[0] <= 1.01 * scans[1]), label
        assert shared.bytes.total < own.bytes.total
    assert True in met


def test_a_vocabulary_that_is_small_is_not_shared():
    """The sums would then cost more than the first and last rank save."""
    assert shares(configs.load(SMALL, ["parallel.pp=2", "parallel.dp=1"])) is False
    slow = large("parallel.costs=" + str(SMALL.parent / "missing.json"))
    with pytest.raises(ConfigError, match="cannot read op seconds"):
        shares(slow)


@pytest.mark.parametrize(
    "how",
    [
        ["parallel.pp=1"],
        ["parallel.defer_embed_head=true"],
        ["runtime.cpu_devices=2"],
        ["parallel.schedule=dualpipe", "train.grad_accum_steps=3"],  # this schedule does not exist
        ["parallel.schedule=zb_h1", "parallel.memory_limit=0.5"],
        ["parallel.layer_split=[1,2]"],
    ],
)
def test_where_it_cannot_be_it_is_as_without(how):
    """It causes no error that false would not cause, and otherwise the same one."""
    said = []
    for word in ("auto", "false"):
        try:
            resolved(large(*how, f"parallel.vocab_parallel_pp={word}"))
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append(None)
    assert said[0] == said[1]


def test_cpus_compute_their_own_ends():
    assert shares(large(), "cpu") is False
    assert not arrange(large(), Devices("cpu")).lockstep.vocab_parallel
    assert Trainer.resolve(large(), jax.devices()[:2]).config.parallel.vocab_parallel_pp is False


@pytest.mark.slow
def test_the_memory_of_the_device_decides_nothing():
    """Nor does knowing it: a run that resumes on other devices resolves alike."""
    config = large("parallel.schedule=zb_auto", "parallel.memory_limit=auto")
    for memory in (2.0**31, 2.0**36):
        plan = arrange(config, Devices(memory=memory))
        assert plan.lockstep.vocab_parallel is shares(config)


def test_what_a_run_has_measured_decides_nothing(tmp_path):
    """Its first start has no measurement yet, and a later one resumes with its parameters."""
    config = large("parallel.costs=measure", f"run.dir={tmp_path}")
    seconds = analytic(config, Hardware())
    before = shares(config)
    for one in (config, arrange(config).config):
        write_own(one, replace(seconds, transfer=1.0))  # would make sums expensive
        assert op_seconds(one).transfer == 1.0
        assert shares(config) is before is True


def test_a_plan_marks_what_is_shared(capsys):
    assert main([str(SMALL), *LARGE]) == 0
    lines = capsys.readouterr().out.splitlines()
    (own,) = (line.split() for line in lines if line.startswith("1f1b *"))
    assert own[2] == "shared"
    assert main([str(SMALL), *LARGE, "parallel.vocab_parallel_pp=false", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert {row["embed_head"] for row in rows} == {"own"}
