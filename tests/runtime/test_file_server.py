"""Files that processes read from each other's hosts: whole, in parts, and not without the word."""

import contextlib
import http.client
import os
import socket
import threading
import time

import pytest

from jaxpipe.runtime import bounded_server
from jaxpipe.runtime.file_server import FileServer, fetch, send


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    for name in ("secret.json", "files/0.json"):
        (tmp_path / name).write_text("secret")
    server = FileServer(tmp_path / "files", "word")
    yield server
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_file_is_sent_and_read_in_parts(server, tmp_path, host):
    if host == "::1" and server.address_family != socket.AF_INET6:
        pytest.skip("this machine has no IPv6")
    content, address = bytes(range(256)) * 9000, f"{host}:{server.port}"
    (tmp_path / "own").write_bytes(content)
    send(address, "word", "1/5-0-2/0.bin", tmp_path / "own")
    assert (tmp_path / "files" / "1" / "5-0-2" / "0.bin").read_bytes() == content
    assert fetch(address, "word", "1/5-0-2/0.bin") == content
    assert fetch(address, "word", "1/5-0-2/0.bin", 1000, 70) == content[1000:1070]
    assert fetch(address, "word", "1/5-0-2/0.bin", 1000, 0) == b""


@pytest.mark.parametrize(
    ("word", "name", "reason"),
    [
        ("other", "0.json", "Forbidden"),
        ("", "0.json", "Forbidden"),
        ("word", "../secret.json", "Not Found"),
        ("word", "%2e%2e/secret.json", "Not Found"),
    ],
)
def test_other_requests_are_refused(server, tmp_path, word, name, reason):
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(OSError, match=reason):
        fetch(address, word, name)
    (tmp_path / "own").write_bytes(b"other")
    with pytest.raises(OSError, match=reason):
        send(address, word, name, tmp_path / "own")
    assert [path.read_text() for path in tmp_path.rglob("*.json")] == ["secret"] * 2


def test_a_file_that_ends_too_early_is_not_kept(server, tmp_path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Authorization": "word", "Content-Length": "9"}
    connection.request("PUT", "/1/0.bin", b"half", headers)
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.getresponse().status == 507
    connection.close()
    assert not list(tmp_path.glob("files/1/*"))


@pytest.mark.parametrize("length", [None, "-1", "x", "9"])
def test_a_file_without_its_length_or_end_leaves_nothing(server, tmp_path, length):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        line = f"Content-Length: {length}\r\n" if length else ""
        connection.sendall(
            f"PUT /7/0.bin HTTP/1.0\r\nAuthorization: word\r\n{line}\r\nhalf".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(20).split()[1] in (b"411", b"507")
    assert not (tmp_path / "files" / "7").exists()


def test_connections_without_the_word_take_no_thread_and_few_descriptors(server, monkeypatch):
    """They are closed soon, and requests with the word are answered meanwhile."""
    monkeypatch.setattr(bounded_server, "_SECONDS", 1.0)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(80)]
    try:
        for connection in idle[::3]:
            connection.sendall(b"GET / HTTP/1.0\r\nAuthor")
        assert fetch(f"127.0.0.1:{server.port}", "word", "0.json") == b"secret"
        assert threading.active_count() <= threads + 1
        deadline = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > files + len(idle) + 2:  # the server's own
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for connection in idle:
            connection.close()


def test_a_request_may_come_in_pieces(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for piece in (b"GET /0.json HTTP/1.0\r\n", b"authorization:word\r", b"\n\r\n"):
            connection.sendall(piece)
            time.sleep(0.15)
        assert connection.makefile("rb").read().endswith(b"secret")


def test_headers_without_end_are_not_kept(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.0\r\nX: " + b"x" * 100_000)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""


def test_a_host_that_is_gone_is_reported(server, tmp_path):
    (tmp_path / "own").write_bytes(b"")
    server.close()
    with pytest.raises(OSError, match="does not answer"):
        send(f"127.0.0.1:{server.port}", "word", "0.bin", tmp_path / "own")
