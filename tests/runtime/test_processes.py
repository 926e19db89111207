"""Runs of several processes: the same losses, interchangeable checkpoints, and a common end."""

import json
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import layout
import numpy as np
import pytest
from commands import SMALL, losses, start, train_command
from several import ends, free_port, start_all, wait_for_step

from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.runtime import command, processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import directory

DEVICES = 8
MESH = {  # other layouts of the same global batch; each process has full pipeline ranks or parts
    "as it was": [],
    "zbv": ["parallel.schedule=zbv", "parallel.pp=2", "parallel.tp=2", "parallel.costs=measure"],
    "zero3": ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.zero_stage=3"],
}


def spawn(count, directory, *overrides):
    """Start `count` processes of one run, each with its share of the devices."""
    return start_all(count, train_command(directory, *overrides, devices=DEVICES // count))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    assert train.main([str(SMALL), f"run.dir={directory}"]) == 0
    return directory


@pytest.fixture(scope="module")
def run_by(tmp_path_factory, one_process):
    """Return the directory of a complete run by a given number of processes."""

    @cache
    def of(count):
        if count == 1:
            return one_process
        directory = tmp_path_factory.mktemp(f"by-{count}")
        for code, output in ends(spawn(count, directory)):
            assert code == 0, output
        return directory

    return of


def close(got, want):
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-6)


@pytest.mark.extended
@pytest.mark.versions
@pytest.mark.slow(unless=["2"])
@pytest.mark.parametrize("count", [2, 4])
def test_several_train_as_one(one_process, run_by, count):
    assert list(losses(run_by(count))) == list(range(1, 13))
    close(losses(run_by(count)), losses(one_process))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "count", "mesh"),
    [(1, 4, "zero3"), (4, 2, "zbv")],
)
def test_checkpoints_interchange(one_process, run_by, tmp_path, saved_by, count, mesh):
    """Truncate to step 4 and resume with other processes and another mesh.

    With zbv the order is searched for op times that the processes measure together: if their orders
    differed, they would wait for each other forever.
    """
    cut = tmp_path / "cut"
    shutil.copytree(run_by(saved_by), cut)
    for step in (8, 12):
        shutil.rmtree(cut / "checkpoints" / str(step))
    for code, output in ends(spawn(count, cut, *MESH[mesh])):
        assert code == 0, output
    close(losses(cut), losses(one_process))
    assert (cut / "costs.json").exists() == ("parallel.costs=measure" in MESH[mesh])


@pytest.mark.slow
def test_damage_that_one_process_finds_all_set_aside(run_by, tmp_path):
    """Each process compares the files that it wrote, and the first those that all share."""
    shutil.copytree(run_by(2), tmp_path, dirs_exist_ok=True)
    step = tmp_path / "checkpoints" / "12" / "state"
    for index in range(2):
        lines = (step / f"checksums.process_{index}.xxh128").read_text().splitlines()
        names = [line.split("  ")[1] for line in lines]
        assert names
        assert all(name.startswith(f"ocdbt.process_{index}/") for name in names)
    path = max((step / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = ends(spawn(2, tmp_path))
    for code, output in found:
        assert code == 0, output
    assert "checkpoint 12 is damaged (another process found it damaged): moved" in found[0][1]
    assert "resumed from step 8" in found[0][1]
    assert (tmp_path / "checkpoints" / "damaged-12").is_dir()
    assert list(losses(tmp_path)) == list(range(1, 13))


@pytest.mark.slow
def test_a_process_may_hold_nothing_but_padding(tmp_path):
    """Of 64 rows, three replicas in the first process have 32, 32 and 0, in the second 0."""
    sizes = ["model.d_model=64", "parallel.pp=1", "optimizer.eps=1e-2", "train.eval_every=0"]
    padded = [*sizes, "parallel.dp=6"]
    whole = [*sizes, "parallel.dp=1", "train.microbatch_size=6"]
    for code, output in ends(start_all(2, train_command(tmp_path / "cut", *padded, devices=3))):
        assert code == 0, output
    for step in (8, 12):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / str(step))
    for name in ("cut", "whole"):
        ((code, output),) = ends(start_all(1, train_command(tmp_path / name, *whole, devices=1)))
        assert code == 0, output
        assert ("resumed from step 4" in output) == (name == "cut")
    close(losses(tmp_path / "cut"), losses(tmp_path / "whole"))


@pytest.mark.slow
def test_slurm_says_who_is_who(tmp_path, one_process):
    """The variables that `srun` sets for its tasks, and no others, make two processes one run."""
    names = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    job = dict(zip(names, (str(free_port()), "2", "2", "localhost")))
    command = train_command(tmp_path, devices=DEVICES // 2)
    group = [
        start(command, job | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)})
        for index in range(2)
    ]
    for code, output in ends(group):
        assert code == 0, output
    close(losses(tmp_path), losses(one_process))


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_the_same_step(tmp_path):
    group = spawn(2, tmp_path, "train.steps=100000", "checkpoint.every=100000")
    wait_for_step(tmp_path, 5)
    group[1].send_signal(signal.SIGUSR1)
    (code, output), (other, _) = ends(group)
    assert (code, other) == (138, 138), output
    last = max(losses(tmp_path))
    assert f"SIGUSR1: stopped after step {last}" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(last)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 3])
def test_when_one_dies_the_others_say_so_and_fewer_go_on(tmp_path, killed):
    """With 4 processes of 2 devices each, a device may wait for one in its own process."""
    group = spawn(4, tmp_path, "train.steps=100000", "checkpoint.every=5")
    wait_for_step(tmp_path, 12)
    group[killed].kill()
    start = time.monotonic()
    found = ends(group)
    assert time.monotonic() - start < 60
    for index, (code, output) in enumerate(found):
        if index != killed:
            assert code == 3, output
            assert output.count("\nerror: ") == 1, output
            assert "goes on from the newest checkpoint" in output
    done = max(losses(tmp_path))
    steps = [f"train.steps={done + 3}", "optimizer.decay=constant"]
    (code, output), *_ = ends(spawn(1, tmp_path, *steps, "runtime.cpu_devices=8"))
    assert code == 0, output
    assert "resumed from step" in output
    assert list(losses(tmp_path)) == list(range(1, done + 4))


@pytest.mark.slow
def test_when_one_reads_a_bad_id_the_others_stop(tmp_path):
    """The first opens the data before the others and finds the bad id; they may, too."""
    ids = np.zeros(40_000, "<u2")
    ids[1 * 32 + 5] = 999  # of the second sample
    layout.write(tmp_path / "a.bin", [[ids.tolist()]], "uint16")
    data = ["data.source=file", f"data.path={tmp_path}/a.bin", "data.shuffle=false"]
    mesh = ["parallel.pp=4", "parallel.dp=2", "parallel.pipeline_first=true"]
    start = time.monotonic()
    first, second = ends(spawn(2, tmp_path / "run", "train.steps=100000", *mesh, *data))
    assert (first[0], second[0]) == (2, 2), second[1] + first[1]
    assert "has 999 at position" in first[1]
    assert "process 0 ended: " in second[1] or "has 999 at position" in second[1]
    assert time.monotonic() - start < 90


@pytest.mark.extended
@pytest.mark.parametrize(
    ("differs", "part"),
    [("optimizer.lr=0.5", "optimizer.lr: 0.5 in process 1, 0.01 in process 0"),
     ("JAX_DEFAULT_MATMUL_PRECISION=float32", "JAX_DEFAULT_MATMUL_PRECISION: float32 in process")],
)  # fmt: skip
def test_processes_that_differ_do_not_begin(tmp_path, differs, part):
    command = train_command(tmp_path, devices=1)
    places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    mesh = ["parallel.pp=2", "parallel.dp=1"]
    key, _, value = differs.partition("=")
    words, names = ([differs], {}) if "." in key else ([], {key: value})
    group = [
        start([*command, *mesh, *more], places | own | {"JAX_PROCESS_ID": str(index)})
        for index, (more, own) in enumerate([([], {}), (words, names)])
    ]
    for code, output in ends(group):
        assert code == 2, output
        assert f"differ in {part}" in output


@pytest.mark.parametrize(
    "given",
    [("a:1", None, "0"), ("a:1", "2", None), ("a:1", "two", "0"), ("a:1", "2", "2"),
     ("a:1", "2", "-1"), (None, "4", "1"), (None, None, "1"), ("", "4", "1")],
)  # fmt: skip
def test_half_an_environment_is_one_sentence(monkeypatch, given):
    for name, value in zip(processes._NAMES, given):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    address, count, index = given
    with pytest.raises(ConfigError, match=f"are {address}, {count} and {index}: set all three, or"):
        processes.started()


def test_launchers_are_asked_how_many_there_are(monkeypatch):
    assert processes.started() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    assert processes.started() == 16


@pytest.mark.slow
def test_saving_and_restoring_take_a_processs_own_share_of_memory(tmp_path):
    """Two processes with half of 1.5 GiB each; then one with all of it, under another pp."""
    script = str(Path(__file__).parents[1] / "support" / "io_memory.py")

    def measured(count, mode, pp):
        group = start_all(count, [sys.executable, script, mode, str(tmp_path / "saved"), str(pp)])
        for code, output in ends(group):
            assert code == 0, output
            yield json.loads(output.splitlines()[-1])

    for count, mode, pp in [(2, "save", 2), (2, "restore", 2), (1, "restore", 1)]:
        for found in measured(count, mode, pp):
            assert found["share"] > 1.5 * 2**30 / count * 0.98
            assert found["extra"] < 1.3 * found["share"], (count, mode, found)


def test_processes_with_directories_of_their_own_do_not_begin(tmp_path, monkeypatch):
    """The second process does not find what the first has left."""
    monkeypatch.setattr(directory, "_SHARED_SECONDS", 0.2)
    first = {"mark in the run directory": ".shared-0", "sight of the run directory": ""}

    def gather(name, text):
        return [first.get(name, "0"), text]

    second = Group(SimpleNamespace(index=1, count=2, gather=gather))
    with pytest.raises(
        ConfigError, match="of process 1 is not that of process 0: put it on a file"
    ):
        directory.check_shared(tmp_path, second)
    (tmp_path / ".shared-0").touch()
    directory.check_shared(tmp_path, second)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("UNAVAILABLE: Connection reset by peer", 3),
        ("INTERNAL: gloo: connection closed", 3),
        ("INVALID_ARGUMENT: no such option", 70),
        ("INTERNAL: CpuCallback error calling callback: ValueError", 70),
    ],
)
def test_a_failure_of_its_own_is_not_blamed_on_others(message, code, monkeypatch, capsys):
    def leave(code, sentence):
        raise SystemExit(code)

    monkeypatch.setattr(processes, "leave", leave)
    monkeypatch.setattr(processes, "several", lambda: True)

    def fail():
        raise jax.errors.JaxRuntimeError(message)

    with pytest.raises(SystemExit) as ended:
        command.run(fail)
    assert ended.value.code == code
