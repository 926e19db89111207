"""Runs that lose a host go on from local saves, without a checkpoint in run.dir."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from commands import complete, losses, start, train_command
from several import REPOSITORY, ends, free_port, wait_for_step

HOSTS = """
import os, socket
socket.gethostname = lambda: "host" + os.environ["JAX_PROCESS_ID"]
"""
EVERY = 3


@pytest.fixture
def start_hosts(tmp_path):
    """Return a function that starts processes, each with a host name and a folder of its own."""
    (tmp_path / "sitecustomize.py").write_text(HOSTS)

    def start_all(run, count, *overrides):
        command = train_command(
            tmp_path / run, *overrides, "train.eval_every=0", "optimizer.decay=constant",
            "checkpoint.every=0", f"checkpoint.local_every={EVERY}", "checkpoint.local_dir=local",
            devices=1,
        )  # fmt: skip
        places = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(count),
            "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        }  # fmt: skip
        group = []
        for index in range(count):
            host = tmp_path / f"host{index}"
            host.mkdir(exist_ok=True)
            group.append(start(command, places | {"JAX_PROCESS_ID": str(index)}, cwd=host))
        return group

    return start_all


def lose_a_host(group, lost, tmp_path):
    """Kill a process and remove its folder after step 8; return the last step that was logged."""
    saved = f"host?/local/*/?/{2 * EVERY}-*/?.json"
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob(saved))) < 2 * len(group):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_for_step(tmp_path / "run", 8)
    group[lost].send_signal(signal.SIGKILL)
    codes = [code for code, _ in ends(group)]
    assert codes == [-9 if index == lost else 3 for index in range(len(group))]
    shutil.rmtree(tmp_path / f"host{lost}")
    assert complete(tmp_path / "run") == []
    return max(losses(tmp_path / "run"))


def restored_step(output):
    return int(output.partition("resumed from step ")[2].split()[0])


@pytest.mark.slow
def test_a_lost_host_costs_no_more_than_the_steps_between_local_saves(start_hosts, tmp_path):
    """The host that takes the place of the lost one has no files, and all losses stay the same."""
    settings = ["parallel.pp=2", "parallel.dp=2", "parallel.zero_stage=3"]
    last = lose_a_host(start_hosts("run", 4, *settings, "train.steps=100000"), 2, tmp_path)

    settings.append(f"train.steps={last + 2}")
    ended = ends(start_hosts("run", 4, *settings))
    assert [code for code, _ in ended] == [0] * 4, ended
    step = restored_step(ended[0][1])
    assert f"step {step} is restored from local saves" in ended[0][1]
    assert 0 <= last - step <= EVERY
    assert not list(tmp_path.glob("host?/local/*/?/*"))  # the last step is in run.dir
    assert [code for code, _ in ends(start_hosts("whole", 4, *settings))] == [0] * 4
    assert json.dumps(losses(tmp_path / "run")) == json.dumps(losses(tmp_path / "whole"))


@pytest.mark.slow
def test_a_smaller_mesh_goes_on_from_copies(start_hosts, tmp_path):
    settings = ["parallel.pp=3", "parallel.dp=1", "runtime.min_devices=2"]
    last = lose_a_host(start_hosts("run", 3, *settings, "train.steps=100000"), 2, tmp_path)
    before = losses(tmp_path / "run")

    ended = ends(start_hosts("run", 2, *settings, f"train.steps={last + 1}"))
    assert [code for code, _ in ended] == [0, 0], ended
    output, after = ended[0][1], losses(tmp_path / "run")
    assert "parallel.pp=2 instead of 3; a step keeps its 128 tokens" in output
    step = restored_step(output)
    assert f"step {step} is restored from local saves" in output
    assert 0 <= last - step <= EVERY
    assert list(after) == list(range(1, last + 2))
    again = range(step + 1, last + 1)
    np.testing.assert_allclose(
        [after[step] for step in again], [before[step] for step in again], rtol=1e-6
    )
