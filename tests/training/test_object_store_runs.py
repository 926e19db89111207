"""Runs whose run.dir is in an object store: the same numbers as on a disk, and kills lose nothing.

`STORE_KILLS=200` repeats the run that is killed at random moments.
"""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest
from commands import SMALL, losses, start, train_command
from object_store import BUCKET, clear, connect, keys, read, s3_server
from several import ends, start_all

from jaxpipe import train
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage.files import open_path

KILLS = int(os.environ.get("STORE_KILLS", "3"))
TINY = [
    "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
    "model.d_ff=16", "train.seq_len=8", "train.grad_accum_steps=4", "train.eval_every=0",
    "checkpoint.keep=3",
]  # fmt: skip
FIRST = ["parallel.pp=2", "parallel.dp=4", "train.microbatch_size=1"]
THEN = ["parallel.pp=4", "parallel.dp=2", "train.microbatch_size=2"]
ENDS = [(signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGSTOP, signal.SIGKILL)]
ONE = ["parallel.pp=1", "parallel.dp=1", "train.microbatch_size=4"]


@pytest.fixture(scope="module")
def server():
    server = s3_server()
    clear(server)
    return server


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    return connect(server, tmp_path, monkeypatch)


def run(directory, *settings):
    return train.main([str(SMALL), f"run.dir={directory}", *TINY, *settings])


def stored_losses(server, folder):
    lines = map(json.loads, read(server, f"{folder}/metrics.jsonl").splitlines())
    return {line["step"]: line["loss"] for line in lines}


def committed(server, folder):
    found = (re.fullmatch(rf"{folder}/checkpoints/(\d+)/commit_success.txt", key)
             for key in keys(server, f"{folder}/checkpoints/"))  # fmt: skip
    return sorted(int(match[1]) for match in found if match)


@pytest.mark.extended
def test_a_run_resumes_on_another_mesh_with_the_bits_of_a_run_on_a_disk(store, tmp_path, capsys):
    """Logs begin with what the store has: the cache of the machine that ran before is not there."""
    for directory in (tmp_path / "disk", f"s3://{BUCKET}/run"):
        assert run(directory, *FIRST, "train.steps=4", "checkpoint.every=2") == 0
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert run(directory, *THEN, "train.steps=6", "checkpoint.every=2") == 0
    assert stored_losses(store, "run") == losses(tmp_path / "disk")
    assert list(stored_losses(store, "run")) == [1, 2, 3, 4, 5, 6]
    assert committed(store, "run") == [2, 4, 6]
    assert len(read(store, "run/starts.jsonl").splitlines()) == 2
    assert "resumed from step 4" in capsys.readouterr().out


def spawn(server, cache, folder, *settings):
    """Start a run on one device, which saves every second step."""
    command = train_command(
        f"s3://{BUCKET}/{folder}", *TINY, *ONE, "checkpoint.every=2", *settings, devices=1
    )
    return start(command, server.environment | {"XDG_CACHE_HOME": str(cache)})


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(store, tmp_path):
    """SIGKILL at a write of step 4's arrays: step 2 is read, the half step is removed."""
    process, requests = spawn(store, tmp_path, "killed", "train.steps=6"), []

    def kill(method, path):
        if method in ("PUT", "POST") and "/killed/checkpoints/4/state/" in path:
            requests.append(path)
            if len(requests) == 3:
                process.kill()

    store.on_request = kill
    output, _ = process.communicate(timeout=300)
    store.on_request = lambda method, path: None
    assert process.returncode == -signal.SIGKILL, output
    assert committed(store, "killed") == [2]
    assert keys(store, "killed/checkpoints/4/")
    checkpoints = open_path(f"s3://{BUCKET}/killed/checkpoints")
    assert list_steps(checkpoints) == [2]
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        StoredCheckpoint(checkpoints / "4")
    output, _ = (process := spawn(store, tmp_path, "killed", "train.steps=6")).communicate()
    assert process.returncode == 0, output
    assert "resumed from step 2" in output
    assert committed(store, "killed") == [2, 4, 6]
    assert list(stored_losses(store, "killed")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_several_processes_of_which_one_is_killed_in_a_save(store, tmp_path):
    """Process 1 of four ends at its third write of step 4's arrays; all start again."""
    mesh = ["parallel.pp=2", "parallel.dp=2", "train.microbatch_size=2", "train.steps=6"]

    def start_four(directory):
        command = train_command(directory, *TINY, *mesh, "checkpoint.every=2", devices=1)
        folders = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return start_all(4, command, folders)

    assert [code for code, _ in ends(start_four(tmp_path / "disk"))] == [0] * 4
    group, writes = start_four(f"s3://{BUCKET}/four"), []

    def kill(method, path):
        if method in ("PUT", "POST") and "/four/checkpoints/4/state/" in path:
            writes.append(path)
            if len(writes) == 3:
                group[1].kill()

    store.on_request = kill
    found = ends(group)
    store.on_request = lambda method, path: None
    assert [code for code, _ in found] == [3, -signal.SIGKILL, 3, 3], found
    assert committed(store, "four") == [2]
    found = ends(start_four(f"s3://{BUCKET}/four"))
    assert [code for code, _ in found] == [0] * 4, found
    assert "resumed from step 2" in found[0][1]
    assert committed(store, "four") == [2, 4, 6]
    assert stored_losses(store, "four") == losses(tmp_path / "disk")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_at_any_moment_it_goes_on_from_the_last_save(store, tmp_path, straight, seed):
    """SIGKILL, SIGTERM, or SIGSTOP and SIGKILL, at random moments of starts, steps and saves."""
    chance, folder, lives = random.Random(seed), f"seed{seed}", 0
    while True:
        lives += 1
        # Another machine goes on: it has nothing but the store.
        cache = tmp_path / str(lives % 2)
        shutil.rmtree(cache, ignore_errors=True)
        process = spawn(store, cache, folder, "train.steps=20")
        if lives < 4:
            end_at_random(chance, process, store, f"/{folder}/checkpoints/")
        output, _ = process.communicate(timeout=300)
        before = stored_losses(store, folder) if keys(store, f"{folder}/metrics.jsonl") else {}
        for step in committed(store, folder):
            assert step in before, "the log lacks steps of a checkpoint"
        if process.returncode == 0:
            break
        assert process.returncode in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM), (
            output
        )
    assert stored_losses(store, folder) == straight
    assert committed(store, folder) == [16, 18, 20]


def end_at_random(chance, process, server, place):
    """End a process some time after its first request for a checkpoint, or while it starts."""
    seen = []
    server.on_request = lambda method, path: seen.append(path) if place in path else None
    if chance.random() < 0.8:
        while process.poll() is None and len(seen) < chance.choice([1, 20, 60, 100]):
            time.sleep(0.01)
    time.sleep(chance.uniform(0, 1.5))
    for number in chance.choice(ENDS):
        process.send_signal(number)
        time.sleep(0.2)
    server.on_request = lambda method, path: None


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the losses of an undisturbed run on a disk."""
    directory = tmp_path_factory.mktemp("straight")
    command = train_command(directory, *TINY, *ONE, "train.steps=20", devices=1)
    output, _ = (process := start(command)).communicate()
    assert process.returncode == 0, output
    return losses(directory)
