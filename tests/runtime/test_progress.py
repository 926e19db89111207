"""A save counts as hung when no byte moves within the limit, however slow it is."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fsspec import asyn

from jaxpipe.checkpoint import integrity
from jaxpipe.checkpoint.movement import movement_of
from jaxpipe.runtime import position, watchdog
from jaxpipe.runtime.connections import bytes_to_stores
from jaxpipe.runtime.file_server import FileServer, fetch, send
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import object_stores
from jaxpipe.runtime.watchdog import Watchdog

LIMIT = 600  # of a save [s], where `runtime.hang_timeout` is auto


class Clock:
    """A stand-in for `time`, whose `now` a test sets."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (position, watchdog):
        monkeypatch.setattr(module, "time", clock)
    for name in ("now", "moved", "finished"):  # which the test changes
        monkeypatch.setattr(position, name, getattr(position, name))
    position.moved = -float("inf")
    return clock


def longest_idle(clock, file, seconds, every):
    """The longest time without progress that the watchdog sees in a save that writes now and then.

    A byte is written every `every` seconds; 0: never.
    """
    dog, worst = Watchdog("auto", Group()), 0.0
    unfinished = file.parent.parent.parent
    position.enter("save", 4)
    with position.metered(movement_of(unfinished, 0)):
        for second in range(1, seconds):
            clock.now += 1
            if every and second % every == 0:
                with file.open("ab") as opened:
                    opened.write(b"x")
            dog._measure()
            worst = max(worst, clock.now - max(position.now.since, position.moved))
    return worst


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "4.orbax-checkpoint-tmp" / "state"
    folder.mkdir(parents=True)
    return folder / "array"


@pytest.mark.parametrize("every", [1, 60, 500])
def test_a_save_that_moves_a_byte_now_and_then_is_no_hang(clock, file, every):
    assert longest_idle(clock, file, 2000, every) <= LIMIT


def test_a_save_that_moves_nothing_is_a_hang_in_the_limit(clock, file):
    file.write_bytes(b"some bytes of before")
    assert longest_idle(clock, file, LIMIT + 10, 0) > LIMIT


def test_files_of_other_processes_are_not_looked_at(tmp_path):
    folders = [tmp_path / "4.orbax-checkpoint-tmp" / f"ocdbt.process_{i}" for i in (0, 1)]
    for folder in folders:
        folder.mkdir(parents=True)
    measure = movement_of(tmp_path, 0)
    before = measure()
    (folders[1] / "a").write_bytes(b"x")
    assert measure() == before
    (folders[0] / "a").write_bytes(b"x")
    assert measure() != before


def test_every_block_between_hosts_is_progress(clock, tmp_path):
    """Their files are sent and received over HTTP, which no counter sees."""
    path = tmp_path / "own"
    path.write_bytes(bytes(3 << 16))
    server = FileServer(tmp_path / "files", "word")
    address = f"127.0.0.1:{server.port}"
    clock.now += 1
    send(address, "word", "0.bin", path)
    assert position.moved == clock.now
    clock.now += 1
    assert fetch(address, "word", "0.bin") == bytes(3 << 16)
    assert position.moved == clock.now
    server.close()


@pytest.fixture
def slow_store(monkeypatch):
    """A store whose address is in the environment, and this process's connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        place = listens.getsockname()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{place[1]}")
        with socket.create_connection(place) as ours, listens.accept()[0] as theirs:
            yield ours, theirs


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the bytes of a connection")
@pytest.mark.parametrize("way", ["sent", "received", "nothing"])
def test_every_byte_of_a_connection_to_a_store_is_progress(clock, slow_store, way):
    """An object that takes longer than the limit is no hang, though no file is finished."""
    dog, (ours, theirs), worst = Watchdog("auto", Group()), slow_store, 0.0
    position.enter("save", 4)
    with position.metered(movement_of("s3://bucket/run/checkpoints", 0)):
        for second in range(1, 2000):
            clock.now += 1
            if way == "sent" and second % 60 == 0:
                ours.sendall(b"x")
                theirs.recv(1)
                while acknowledged(ours) <= second // 60:
                    time.sleep(0.001)
            if way == "received" and second % 60 == 0:
                theirs.sendall(b"x")
                ours.recv(1)
            dog._measure()
            worst = max(worst, clock.now - max(position.now.since, position.moved))
    assert (worst <= LIMIT) == (way != "nothing")


def acknowledged(link):
    (own,) = (row for row in bytes_to_stores(python=True) if row[0] == link.fileno())
    return own[1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the bytes of a connection")
def test_other_connections_are_no_progress_of_a_save(slow_store, monkeypatch):
    """Neither those to other programs, nor the uploads of logs by fsspec."""
    ours, theirs = slow_store
    monkeypatch.setattr(asyn, "loop", [SimpleNamespace(_selector=Registered({ours.fileno()}))])
    measure = movement_of("s3://bucket/run/checkpoints", 0)
    before = measure()
    theirs.sendall(b"x")
    assert measure() == before
    with ThreadPoolExecutor(1, integrity._READERS) as threads:  # it reads files back
        threads.submit(int).result()
        assert measure() != before
    monkeypatch.setattr(asyn, "loop", [None])
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    before = measure()
    theirs.sendall(b"x")
    assert measure() == before


def test_a_look_at_connections_leaves_files_open(slow_store, tmp_path):
    with (tmp_path / "a").open("w") as file:
        bytes_to_stores(python=True)
        file.write("x")
    slow_store[0].sendall(b"x")


class Registered:
    """A stand-in for a selector, with the descriptors that it waits for."""

    def __init__(self, descriptors):
        self._descriptors = descriptors

    def get_map(self):
        return dict.fromkeys(self._descriptors)


def test_a_copy_from_a_store_is_measured_by_its_connections(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(object_stores, "bytes_to_stores", lambda python: ("bytes", python))
    monkeypatch.setattr(object_stores, "_fetch", lambda *file: seen.append(position.meter()))
    with position.metered(lambda: "of a caller"):
        object_stores.fetch_files("s3://tokens", tmp_path, {"a.bin": {"size": 1}})
        assert (seen, position.meter()) == ([("bytes", True)], "of a caller")
