"""The compile options: none on CPU, and on GPUs all that the installed XLA knows."""

import jax
import pytest
from commands import SMALL
from resolving import resolved

from jaxpipe import train
from jaxpipe.config import ConfigError, load
from jaxpipe.runtime.programs import compiler
from jaxpipe.runtime.programs.compiler import Option, of_purpose
from jaxpipe.training.trainer import Trainer

pytestmark = pytest.mark.versions

STEP = of_purpose("step")
PURPOSES = ("step", "offload", "deterministic", "ring", "deviceless", "costs")


def option(name, value, purpose="step"):
    return Option(name, purpose, {"0.10": value}, "to see")


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    jax.jit(lambda: 0)()  # XLA reads the flags of all tests once, before its first program
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_none_on_cpu():
    assert compiler.options("cpu") == compiler.options("tpu") == {}


def test_the_installed_xla_knows_every_option():
    options = compiler.options("gpu")  # a warning would be an error here
    assert set(options) == {one.name for one in STEP}
    assert options == compiler.options("cuda")
    jax.jit(lambda: 0, compiler_options=options).lower().compile()
    assert compiler.accepted(compiler.TABLE)[1] == []


def test_every_option_has_a_purpose_and_a_reason():
    assert {one.purpose for one in compiler.TABLE} == set(PURPOSES)
    for purpose in PURPOSES:
        names = [one.name for one in of_purpose(purpose)]
        assert len(names) == len(set(names)) > 0
    assert all(one.why.endswith(".") for one in compiler.TABLE)
    assert all(one.noticed for one in STEP)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("xla_gpu_no_such_option", True, "No such compile option"),
        ("xla_gpu_enable_command_buffer", "FUSION,NO_SUCH_KIND", "not a valid enum value"),
        ("xla_gpu_experimental_parallel_collective_overlap_limit", "four", "not a valid"),
    ],
)
def test_what_xla_does_not_know_is_left_out_with_a_sentence(monkeypatch, name, value, why):
    own = (option(name, value), *STEP[:1])
    kept, (sentence,) = compiler.accepted(own)
    assert set(kept) == {STEP[0].name}
    assert sentence.startswith(name)
    assert why in sentence
    monkeypatch.setattr(compiler, "TABLE", own)
    with pytest.warns(UserWarning, match=f"{name} is left out"):
        assert compiler.options("gpu") == kept


def test_a_value_is_that_of_the_installed_jax(monkeypatch):
    """The value of the newest version that is not newer than jax; an older jax gets a warning."""
    name = "xla_gpu_enable_command_buffer"
    kinds = Option(name, "step", {"0.10": "FUSION", "0.11": "CUBLAS", "0.99": "NEW_KIND"}, "to see")
    for version, value in (((0, 10, 1), "FUSION"), ((0, 11, 0), "CUBLAS"), ((0, 12, 0), "CUBLAS")):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert compiler.accepted([kinds]) == ({name: value}, [])
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    kept, (sentence,) = compiler.accepted([kinds])
    assert kept == {}
    assert "there is no value for jax" in sentence


def test_an_option_in_xla_flags_is_the_users(monkeypatch):
    longer = f"--{STEP[1].name}_of_another=1"  # begins with the name of an option
    monkeypatch.setenv("XLA_FLAGS", f"--{STEP[0].name}=mine {longer}")
    assert set(compiler.options("gpu")) == {one.name for one in STEP[1:]}


def test_a_deterministic_step_is_told_so(monkeypatch):
    kept = compiler.options("cuda", "deterministic")
    assert (kept["xla_gpu_deterministic_ops"], kept["xla_gpu_autotune_level"]) == (True, 0)
    assert kept.items() >= compiler.options("gpu").items()
    assert compiler.options("cpu", "deterministic") == {}
    jax.jit(lambda: 0, compiler_options=kept).lower().compile()
    asked = []
    monkeypatch.setattr(compiler, "options", lambda *words: asked.append(words))
    for deterministic in (True, False):
        config = load(SMALL, [f"train.deterministic={str(deterministic).lower()}"])
        assert Trainer.resolve(config).train_step
        assert asked.pop() == ("cpu", *["deterministic"] * deterministic)


def test_a_step_that_offloads_is_told_so(monkeypatch):
    more = compiler.options("cuda", "offload")
    assert more.items() - compiler.options("cuda").items() == {
        ("xla_gpu_experimental_parallel_async_compute_limit", 1000)
    }
    assert compiler.options("cpu", "offload") == {}
    jax.jit(lambda: 0, compiler_options=more).lower().compile()
    asked = []
    monkeypatch.setattr(compiler, "options", lambda *words: asked.append(words))
    trainer = Trainer.resolve(load(SMALL, ["train.offload_layers=1"]))
    assert trainer.train_step
    assert asked.pop() == ("cpu", "offload")
    assert trainer.execution.offload_layers == 1


RING = ["parallel.pp=2", "parallel.dp=2", "parallel.cp=2", "parallel.cp_method=ring"]


def test_permutes_of_a_ring_wait_for_its_devices_alone(monkeypatch):
    more = compiler.options("cuda", "ring")
    (option,) = more.items() - compiler.options("cuda").items()
    assert option == ("xla_gpu_collective_permute_connected_components", True)
    assert compiler.options("cpu", "ring") == {}
    asked = []
    monkeypatch.setattr(compiler, "options", lambda *words: asked.append(words))
    assert Trainer.resolve(load(SMALL, RING), jax.devices()[:4]).train_step
    assert asked.pop() == ("cpu", "ring")


def test_a_ring_that_could_wait_for_ever_is_refused(monkeypatch):
    config = load(SMALL, RING)
    resolved(config, platform="gpu")
    (option,) = compiler.of_purpose("ring")
    monkeypatch.setenv("XLA_FLAGS", f"--{option.name}=false")
    with pytest.raises(ConfigError, match="'ring' gives xla_gpu_coll.* set parallel.cp_method=uly"):
        resolved(config, platform="gpu")
    resolved(config, platform="cpu")


def test_what_cannot_be_deterministic_is_refused(monkeypatch):
    config = load(SMALL, ["train.deterministic=true"])
    resolved(config, platform="cpu")
    resolved(config, platform="gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    with pytest.raises(ConfigError, match="autotune_level its value, but XLA_FLAGS names it"):
        resolved(config, platform="cuda")
    resolved(config, platform="cpu")
    resolved(load(SMALL), platform="cuda")
    monkeypatch.delenv("XLA_FLAGS")
    other = (option("xla_no_such", True, "deterministic"),)
    monkeypatch.setattr(compiler, "TABLE", other)
    with pytest.raises(ConfigError, match="needs xla_no_such=True, but this XLA says .*No such"):
        resolved(config, platform="gpu")


def test_gpus_need_a_jax_that_copies_no_rings(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    compiler.check_version("cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert train.main([str(SMALL), f"run.dir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert (
        "copies every ring of a pipeline in every tick on GPUs: install jax 0.11 or later" in said
    )
    assert said.count("\n") == 1
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    compiler.check_version("gpu")
