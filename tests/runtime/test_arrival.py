"""Processes of which some never come say which, and leave nothing where all come."""

import os
import sys
import time

import pytest
from commands import SMALL, start
from several import ends, free_port

from jaxpipe.runtime import arrival, processes
from jaxpipe.runtime.arrival import arriving

SHORT = """
import sys
from jaxpipe import train
from jaxpipe.runtime import arrival
arrival.SECONDS = 20.0
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_those_that_never_come_are_named(tmp_path):
    command = [sys.executable, "-c", SHORT, str(SMALL), f"run.dir={tmp_path}/run"]
    places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "4"}
    group = [
        start([*command, "runtime.cpu_devices=2"], places | {"JAX_PROCESS_ID": index})
        for index in "02"
    ]
    for code, output in ends(group):
        assert code == 3, output
        (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert "but not 1, 3:" in sentence


@pytest.fixture
def one_of_three(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")


@pytest.mark.usefixtures("one_of_three")
def test_nothing_stays_where_all_come(tmp_path):
    directory = tmp_path / "run"
    with arriving(directory):
        assert (directory / "arrived" / "a:1" / "1").is_file()
    assert not directory.exists()
    directory.mkdir()
    (directory / "config.toml").touch()
    with arriving(directory):
        pass
    assert [path.name for path in directory.iterdir()] == ["config.toml"]


@pytest.mark.usefixtures("one_of_three")
def test_files_of_an_earlier_start_do_not_count(tmp_path, monkeypatch, capfd):

    codes = []
    monkeypatch.setattr(arrival.os, "_exit", codes.append)
    monkeypatch.setattr(arrival, "SECONDS", 0.5)
    folder = tmp_path / "arrived" / "a:1"
    folder.mkdir(parents=True)
    for index, age in ((0, 0), (2, 100)):
        (folder / str(index)).write_text(f"host{index}")
        os.utime(folder / str(index), (time.time() - age,) * 2)
    with arriving(tmp_path):
        time.sleep(1)
    assert codes == [3]
    assert "0 (on host0), 1 (on" in (said := capfd.readouterr().err)
    assert "but not 2:" in said


def test_launchers_give_a_place(monkeypatch):
    assert processes.meeting() is None
    for name, value in [("JOB_ID", "77"), ("PROCID", "3"), ("STEP_NUM_TASKS", "16")]:
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert processes.meeting() == ("SLURM-77", 3, 16)
