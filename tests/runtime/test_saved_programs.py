"""A program compiled ahead in one process is loaded by another, which compiles nothing."""

import os
import re
import subprocess
import sys

import pytest
from commands import SMALL, losses, train_command
from several import ends, start_all

from jaxpipe import train

SCRIPT = """
import os, sys
from jaxpipe.runtime import processes
from jaxpipe.runtime.environment import use_cpu_devices
use_cpu_devices(4 // int(os.environ.get("JAX_NUM_PROCESSES", "1")))
processes.join()
import jax
from jax import lax
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec
from jaxpipe.config import ConfigError
from jaxpipe.runtime.programs import program_store
from jaxpipe.runtime.programs.compile_cache import compile_timed

what, folder, width = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
spec = PartitionSpec("i")

def ordered(state, batch):
    total = lax.psum(state["w"] * batch, "i")
    more = lax.cond(total[0] > 0, lambda y: lax.psum(y / 3, "i"), lambda y: y, total)
    return {"w": state["w"] - more}, total.sum()

def free(state, batch):
    branch = lax.cond(batch[0] > 0, lambda y: lax.psum(y * y, "i"), lambda y: y, batch)
    return {"w": state["w"] - branch}, lax.psum(batch, "i").sum()

function = free if what == "free" else ordered
step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec, spec),
                             out_specs=(spec, PartitionSpec()), check_vma=False),
               donate_argnums=0)
own = NamedSharding(mesh, spec)
like = jax.ShapeDtypeStruct((width,), "float32", sharding=own)
devices = list(mesh.devices.flat)
if what in ("save", "free"):
    lowered = step.trace({"w": like}, like).lower(lowering_platforms=("cpu",))
    program = lowered.compile()
    try:
        if processes.first():
            program_store.save_program(folder, "train_step", lowered, program, devices)
    except ConfigError as error:
        print(error)
    processes.finish()
    sys.exit()
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None)
state = {"w": jax.device_put(jax.numpy.linspace(0.1, 1.3, width), own)}
batch = jax.device_put(jax.numpy.linspace(0.7, 2.9, width), own)
compiled.clear()
if what == "older":
    program_store.jax.__version__ = "0.1.2"
if what in ("cut", "damaged"):
    (path,) = folder.glob("*.program")
    content, folder = path.read_bytes(), folder / what
    folder.mkdir()
    last = b"" if what == "cut" else b"!"
    (folder / path.name).write_bytes(content[:-1] + last)
options = {"xla_gpu_deterministic_ops": True} if what == "options" else {}
saved = {} if what == "plain" else {"saved": lambda lowered: program_store.load_program(
    processes.group(), folder, "train_step", lowered, devices, options)}
program, words = compile_timed(step, state, batch, **saved)
print(len(compiled), words)
before = state
for _ in range(3):
    state, loss = program(state, batch)
shards = [shard.data for shard in state["w"].addressable_shards]
numbers = map(float, (loss, *jax.numpy.concatenate(jax.device_get(shards))))
print(before["w"].is_deleted(), [number.hex() for number in numbers])
processes.finish()
"""


AHEAD = f"""
import sys
from pathlib import Path
from jaxpipe.runtime import processes
from jaxpipe.runtime.environment import use_cpu_devices
use_cpu_devices(int(sys.argv[1]))
processes.join()
from jaxpipe.config import load
from jaxpipe.lab.gpu.check import lower_step
from jaxpipe.runtime.programs.program_store import save_program
from jaxpipe.training.trainer import Trainer

trainer = Trainer.resolve(load({str(SMALL)!r}, sys.argv[3:]))
name, lowered = lower_step(trainer, "cpu")
compiled, devices = lowered.compile(), list(trainer.mesh.devices.flat)
if processes.first():
    save_program(Path(sys.argv[2]), name, lowered, compiled, devices)
processes.finish()
"""
SIZES = ["train.steps=2", "train.eval_every=0", "checkpoint.every=0", "log.tensorboard=false"]


def ran(*arguments, script=SCRIPT):
    """Return the lines that a new process without a compile cache prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs") / "new"
    assert ran("save", directory, 8) == []
    return directory


@pytest.mark.extended
def test_a_saved_program_is_loaded_and_computes_the_same_bits(folder):
    how, numbers = ran("load", folder, 8)
    assert how.startswith("0 ")
    assert ", loaded from runtime.programs in " in how
    plain_how, plain = ran("plain", folder, 8)
    assert plain_how.startswith("1 ")
    assert numbers == plain
    assert numbers.startswith("True ")  # the state is donated


@pytest.mark.extended
def test_a_run_loads_the_step_that_was_compiled_for_its_configuration(tmp_path, capsys):
    """The step is lowered from abstract arrays, as `plan --check-gpu` does."""
    ran(8, tmp_path / "programs", *SIZES, script=AHEAD)
    for run, programs in (("ahead", tmp_path / "programs"), ("plain", "")):
        where = [f"run.dir={tmp_path / run}", f"runtime.programs={programs}"]
        assert train.main([str(SMALL), *SIZES, *where]) == 0
        out = capsys.readouterr().out
        assert ("loaded from runtime.programs" in out) == (run == "ahead")
    assert losses(tmp_path / "ahead") == losses(tmp_path / "plain")


UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


@pytest.fixture
def places(tmp_path):
    """Folders to start processes in, which find no file there unless one is written."""
    for name in ("shared", "other"):
        (tmp_path / name).mkdir()
    return tmp_path / "shared", tmp_path / "other"


@pytest.mark.extended
def test_several_processes_load_a_saved_program_together_or_not_at_all(places):
    def run(what, *folders):
        command = [sys.executable, "-c", SCRIPT, what, "programs", "8"]
        found = ends(start_all(2, command, UNCACHED, folders))
        assert [code for code, _ in found] == [0, 0], found
        # Gloo's threads print too, in pieces of lines.
        return [re.findall(r"^(?:\d traced|True|False) .*$", out, re.MULTILINE) for _, out in found]

    shared, other = places
    assert run("save", shared, shared) == [[], []]
    loaded = run("load", shared, shared)
    compiled = run("load", shared, other)
    for (how, numbers), (found, same) in zip(loaded, compiled, strict=True):
        assert how.startswith("0 ")
        assert found.startswith("1 ")
        assert ", since programs has no train_step" in found
        assert numbers == same


@pytest.mark.slow
def test_a_run_of_several_processes_loads_the_step_of_its_configuration(places, tmp_path):
    """One that a single process has saved is of the same program, but of other devices."""
    shared, other = places
    sizes = ["parallel.pp=2", *SIZES]
    save = [sys.executable, "-c", AHEAD, "2", str(shared / "programs"), *sizes]
    assert ends(start_all(2, save, UNCACHED)) == [(0, "")] * 2
    ran(4, other / "programs", *sizes, script=AHEAD)
    cases = ((shared, "loaded from runtime.programs"), (other, ", since the list of device ids is"))
    for folder, how in cases:
        run = folder / "run"
        command = train_command(run, *sizes, "runtime.programs=programs", devices=2)
        for code, output in (found := ends(start_all(2, command, UNCACHED, [folder] * 2))):
            assert code == 0, output
        assert how in found[0][1]
    assert losses(shared / "run") == losses(other / "run") != {}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("what", "width", "reason"),
    [
        ("load", 16, "since the program is "),
        ("older", 8, "since the version of jax is 0.1.2, and in "),
        (
            "options",
            8,
            "since the set of XLA's options is {'xla_gpu_deterministic_ops': True}, and in ",
        ),
        ("cut", 8, "since the size of the program is "),
        ("damaged", 8, "cannot be loaded ("),
    ],
)
def test_another_program_or_version_is_compiled_and_the_log_says_why(folder, what, width, reason):
    how, _ = ran(what, folder, width)
    assert how.startswith("1 ")
    assert ", compiled in " in how
    assert reason in how


def test_without_a_file_the_log_says_so(tmp_path):
    assert f"since {tmp_path} has no train_step" in ran("load", tmp_path, 8)[0]


@pytest.mark.extended
def test_a_program_that_needs_more_threads_is_not_saved_for_cpus(tmp_path, monkeypatch):
    """Each of 4 devices can be in two collectives at once."""
    monkeypatch.setenv("NPROC", "7")
    (sentence,) = ran("free", tmp_path, 8)
    assert "8 threads could wait in its collectives, but XLA has 7: set NPROC" in sentence
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("NPROC", "8")
    assert ran("free", tmp_path, 8) == []
