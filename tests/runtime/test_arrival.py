"""Processes of which some never come say which, and leave nothing where all come."""

import os
import socket
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


@pytest.mark.extended
def test_two_processes_with_one_index_end_within_seconds(tmp_path):
    """Both are process 0: the second finds the port of the first in use."""
    command = [sys.executable, "-m", "jaxpipe.train", str(SMALL), f"run.dir={tmp_path}/run"]
    places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    group = [start(command, places | {"JAX_PROCESS_ID": "0"}) for _ in range(2)]
    began = time.monotonic()
    for code, output in ends(group):
        assert code == 3, output
        assert "were started with index 0 (JAX_PROCESS_ID), on " in output
    assert time.monotonic() - began < 60  # most of it imports


@pytest.mark.usefixtures("one_of_three")
def test_an_index_that_comes_twice_is_named_to_all(tmp_path, monkeypatch):
    """The file of a process that was killed is no second process."""
    monkeypatch.setattr(arrival, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(arrival, "_LINGER", 0.2)
    ended, own = [], tmp_path / "arrived" / "a:1" / "1"
    monkeypatch.setattr(arrival, "_exit", ended.append)
    own.parent.mkdir(parents=True)
    own.write_text("host7 mark")
    with arriving(tmp_path):
        time.sleep(0.2)
        assert not ended
        own.write_text("host8 mark")
        time.sleep(0.15)
        told = (own.parent / "refused").read_text()
        time.sleep(0.3)
    assert ended == [told]
    assert told.endswith("host8: give each of the 3 an index of its own, from 0 to 2.")


def test_launchers_give_a_place(monkeypatch):
    assert processes.meeting() is None
    for name, value in [("JOB_ID", "77"), ("PROCID", "3"), ("STEP_NUM_TASKS", "16")]:
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert processes.meeting() == processes.Meeting("SLURM-77", 3, 16)


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_port_in_use_is_named_before_jax_tries_it(tmp_path, monkeypatch, address):
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"localhost:{port}")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        monkeypatch.setenv("JAX_PROCESS_ID", "0")
        monkeypatch.setattr(arrival, "_LINGER", 0.0)
        with (
            pytest.raises(processes.NotMetError, match=f"^port {port} of JAX_COORD.* is in use"),
            arriving(tmp_path / "run"),
        ):
            pytest.fail("it has not tried the port")
    assert not (tmp_path / "run").exists()
    assert processes.port_fault() == ""


def test_the_others_end_with_the_reason_of_process_0(tmp_path, monkeypatch):
    """Not with that of an earlier start."""
    monkeypatch.setattr(arrival, "_LOOK_SECONDS", 0.05)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    ended, refused = [], tmp_path / "arrived" / "a:1" / "refused"
    monkeypatch.setattr(arrival, "_exit", ended.append)
    refused.parent.mkdir(parents=True)
    refused.write_text("process 0 has ended: port 1 is in use")
    os.utime(refused, (1, 1))
    with arriving(tmp_path):
        time.sleep(0.3)
        assert not ended
        os.utime(refused)
        time.sleep(0.5)
    assert ended[0] == "process 0 has ended: port 1 is in use"


def test_proxies_are_hidden_while_processes_meet(monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with processes._without_proxies():
        assert not [name for name in os.environ if name.lower().endswith("_proxy")]
    assert os.environ["HTTPS_PROXY"] == "http://127.0.0.1:9"
