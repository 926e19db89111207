"""Programs of a run are found without a trace where everything that they depend on is the same."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, metrics, start, train_command
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from several import ends, free_port

from jaxpipe.config import load
from jaxpipe.planning import Devices, resolve
from jaxpipe.run import agreement
from jaxpipe.run.agreement import inputs_of_programs
from jaxpipe.runtime.programs.compile_cache import compile_timed
from jaxpipe.runtime.programs.program_store import ProgramStore


@pytest.fixture
def cache(tmp_path):
    """An empty compile cache of this process."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def sharded(devices, *values):
    mesh = Mesh(np.array(devices), "i")
    return jax.device_put(jnp.array(values), NamedSharding(mesh, PartitionSpec("i")))


@pytest.mark.versions
def test_a_stored_program_is_loaded_without_a_trace_and_computes_the_same_bits(cache):
    devices, traces = jax.devices()[:2], []

    @jax.jit
    def program(state):
        traces.append(1)
        return {"mean": (state["x"] / 3).sum(), "x": jnp.sin(state["x"])}

    state = {"x": sharded(devices, 0.3, 0.7)}
    store = ProgramStore("inputs", devices)
    results, words = [], []
    for _ in range(2):
        compiled, took = compile_timed(program, state, stored=store.find("program", state))
        results.append(compiled(state))
        words.append(took)
        jax.clear_caches()
    assert len(traces) == 1
    assert words[0].startswith("traced in ")
    assert words[1].startswith("loaded in ")
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_file_that_cannot_be_read_is_compiled_again(cache):
    devices = jax.devices()[:1]
    store, x = ProgramStore("inputs", devices), sharded(devices, 2.0)
    stored = store.find("square", x)
    assert store.compiled("square", jax.jit(jnp.square), x)(x) == 4
    whole = stored.path.read_bytes()
    assert stored.load()(x) == 4
    for content in (b"", b"no program", whole[:-1], whole[:-100]):
        stored.path.write_bytes(content)
        assert stored.load() is None
        assert store.compiled("square", jax.jit(jnp.square), x)(x) == 4


def test_a_program_is_found_only_where_everything_it_depends_on_is_the_same(cache):
    two, other = jax.devices()[:2], jax.devices()[2:4]
    store, x = ProgramStore("inputs", two), sharded(two, 1.0, 2.0)
    replicated = NamedSharding(x.sharding.mesh, PartitionSpec())
    found = {
        "same": store.find("step", x),
        "name": store.find("other", x),
        "inputs": ProgramStore("changed", two).find("step", x),
        "shape": store.find("step", sharded(two, 1.0, 2.0, 3.0, 4.0)),
        "dtype": store.find("step", x.astype("bfloat16")),
        "sharding": store.find("step", jax.device_put(x, replicated)),
        "tree": store.find("step", {"x": x}),
        "devices": ProgramStore("inputs", other).find("step", x),
        "order": ProgramStore("inputs", two[::-1]).find("step", x),
    }  # fmt: skip
    with jax.default_matmul_precision("highest"):
        found["setting"] = store.find("step", x)
    assert store.find("step", x) == found["same"]
    assert len({stored.path for stored in found.values()}) == len(found)


def test_nothing_is_stored_without_inputs_or_without_a_cache(cache):
    x = sharded(jax.devices()[:1], 1.0)
    assert ProgramStore("", jax.devices()[:1]).find("step", x) is None
    for directory in (None, "gs://bucket/programs"):
        jax.config.update("jax_compilation_cache_dir", directory)
        stored = ProgramStore("inputs", jax.devices()[:1]).find("step", x)
        stored.save(jax.jit(jnp.square).lower(x).compile(), from_cache=False)
        assert stored.load() is None


@pytest.fixture
def own_command(monkeypatch):
    command = SimpleNamespace(__spec__=SimpleNamespace(name="jaxpipe.train"))
    monkeypatch.setitem(sys.modules, "__main__", command)


def plan_of(*overrides):
    return resolve(load(SMALL, overrides), Devices.present(jax.devices()))


def test_inputs_are_all_settings_but_the_run_directory(own_command):
    inputs = inputs_of_programs(plan_of())
    assert inputs_of_programs(plan_of("run.dir=elsewhere")) == inputs
    for changed in ("optimizer.lr=0.007", "train.remat=full", "parallel.schedule=gpipe"):
        assert inputs_of_programs(plan_of(changed)) != inputs
    plan = plan_of()
    assert inputs_of_programs(replace(plan, lockstep=replace(plan.lockstep, pairs=True))) != inputs


def test_inputs_change_with_a_package_and_are_unknown_if_its_source_may(
    own_command, monkeypatch, tmp_path
):
    before = inputs_of_programs(plan_of())
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "flax-0.12.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: flax\nVersion: 0.12.9\n")
    assert inputs_of_programs(plan_of()) not in ("", before)
    (folder / "direct_url.json").write_text('{"url": "file:///flax", "dir_info": {}}')
    assert inputs_of_programs(plan_of()) == ""


def test_inputs_change_with_the_files_of_a_package(own_command, monkeypatch, tmp_path):
    """Those of a fork on the path, or files that were edited where they are installed."""
    before, find = inputs_of_programs(plan_of()), agreement.find_spec
    module = tmp_path / "__init__.py"
    module.write_text("x = 1")
    forked = SimpleNamespace(origin=str(module))
    monkeypatch.setattr(
        agreement, "find_spec", lambda name: forked if name == "optax" else find(name)
    )
    inputs = inputs_of_programs(plan_of())
    assert inputs == inputs_of_programs(plan_of()) != before
    os.utime(module, (1, 1))
    assert inputs_of_programs(plan_of()) not in (inputs, before)


def test_inputs_are_unknown_with_functions_of_the_user_and_in_their_process(
    own_command, monkeypatch
):
    assert inputs_of_programs(plan_of())
    assert inputs_of_programs(plan_of("optimizer.name=optax:lion")) == ""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    assert inputs_of_programs(plan_of()) == ""


@pytest.mark.extended
def test_the_second_start_of_a_run_traces_nothing_and_logs_the_same_numbers(tmp_path):
    def run(name):
        command = train_command(tmp_path / name, "train.steps=3", "train.eval_every=2", devices=8)
        own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
        output = start(command, own).communicate()[0]
        losses = [line["loss"] for line in metrics(tmp_path / name).values()]
        return output, losses

    (first, losses), (second, again) = run("first"), run("second")
    for step in ("train_step", "eval_step"):
        assert f"{step}: traced in " in first
        assert f"{step}: loaded in " in second
    assert losses == again
    for path in (tmp_path / "cache").glob("*.program"):
        path.write_bytes(path.read_bytes()[:-100])
    damaged, same = run("third")
    assert "train_step: traced in " in damaged
    assert same == losses


@pytest.mark.extended
def test_several_processes_load_a_program_together_or_not_at_all(tmp_path):
    def run(name, *caches):
        mesh = ["parallel.pp=2", "train.steps=3", "train.eval_every=0"]
        command = train_command(tmp_path / name, *mesh, devices=2)
        places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        group = [
            start(command, places | {
                "JAX_PROCESS_ID": str(index), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / cache)
            })
            for index, cache in enumerate(caches)
        ]  # fmt: skip
        for code, output in (found := ends(group)):
            assert code == 0, output
        return found[0][1], [line["loss"] for line in metrics(tmp_path / name).values()]

    first, losses = run("first", "shared", "shared")
    assert "train_step: traced in " in first
    for name, cache, how in (("second", "shared", "loaded"), ("third", "own", "traced")):
        output, same = run(name, "shared", cache)
        assert f"train_step: {how} in " in output
        assert same == losses
