"""Files that the processes of a run read from each other's hosts, and write there, over HTTP.

Every request carries a word that the processes share through the coordination service.
"""

import http.client
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

from jaxpipe.config import first_line
from jaxpipe.runtime import position
from jaxpipe.runtime.bounded_server import BoundedServer
from jaxpipe.runtime.storage.directory import remove_with_folders
from jaxpipe.runtime.storage.writing import replace_atomically

_NAME = re.compile(r"[\w-]+(/[\w-]+)*\.\w+", re.ASCII)  # of a file in the folder
_SECONDS = 60  # that a connection which has the word may be silent
_THREADS = 256  # requests of other processes that are answered at once
_BLOCK = 1 << 16  # bytes sent at once, which must take less than `_SECONDS`
_Binary = BinaryIO | BufferedIOBase


class FileServer(BoundedServer):
    """Serves a folder to other processes, in threads, until it is closed.

    Args:
      folder: in which files are read and written; its folders are created as needed.
      word: that requests must carry.
    """

    def __init__(self, folder: Path, word: str):
        self.folder, self.word = folder, word
        super().__init__(0, _Handler, _THREADS)

    def admits(self, headers: bytes) -> bool:
        """Whether the headers have the word."""
        given = re.search(rb"\r\nauthorization:[ \t]*([^\r\n]*)", headers, re.IGNORECASE)
        return given is not None and secrets.compare_digest(given[1].strip(), self.word.encode())


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server: FileServer

    def do_GET(self) -> None:
        """Send `Range: bytes=FIRST-LAST` of a file, or all of it."""
        if (path := self._path()) is None:
            return
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                part = re.findall(r"\d+", self.headers.get("Range", ""))
                first, last = map(int, part or (0, size - 1))
                file.seek(first)
                self.send_response(206 if part else 200)
                self.send_header("Content-Length", str(last - first + 1))
                self.end_headers()
                _copy(file, self.wfile, last - first + 1)
        except FileNotFoundError:
            self.send_error(404)

    def do_PUT(self) -> None:
        """Write a file, which has its name only when it is complete."""
        if (path := self._path()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,18}", length):
            return self.send_error(411)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(path, shared=False, synced=False) as file:
                if _copy(self.rfile, file, int(length)):
                    raise ConnectionError
        except OSError as error:
            remove_with_folders(path.with_name(f"{path.name}.new"), self.server.folder)
            return self.send_error(507, error.strerror)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _path(self) -> Path | None:
        """The file that a request names; None after an answer that there is none."""
        name = self.path.lstrip("/")
        if _NAME.fullmatch(name):
            return self.server.folder / name
        self.send_error(404)
        return None


class NotReachedError(OSError):
    """The other host does not answer."""


def fetch(address: str, word: str, name: str, offset: int = 0, size: int = -1) -> bytes:
    """Read a file of the server at `host:port`, or `size` bytes of it; raises `OSError`."""
    if size == 0:
        return b""  # no range of bytes names none
    part = {} if size < 0 else {"Range": f"bytes={offset}-{offset + size - 1}"}
    return _request("GET", address, word, name, None, part)


def send(address: str, word: str, name: str, path: Path) -> None:
    """Write a file to the server at `host:port`; raises `OSError`."""
    with path.open("rb") as file:
        body, size = _moving(partial(file.read, _BLOCK)), path.stat().st_size
        _request("PUT", address, word, name, body, {"Content-Length": str(size)})


def _request(
    method: str, address: str, word: str, name: str, body: Any, headers: dict[str, str]
) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=_SECONDS, blocksize=_BLOCK)
    try:
        connection.request(method, f"/{name}", body, {**headers, "Authorization": word})
        answer = connection.getresponse()
        content = b"".join(_moving(partial(answer.read1, _BLOCK)))
        if answer.length:
            raise OSError("the file ends too early")
    except (OSError, http.client.HTTPException) as error:
        raise NotReachedError(f"{address} does not answer: {first_line(error)}") from error
    finally:
        connection.close()
    if answer.status >= 300:
        raise OSError(f"{address} refuses {name}: {answer.reason}")
    return content


def _moving(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield blocks until there are no more; each is progress once it was sent or received."""
    while block := read():
        yield block
        position.beat()


def _copy(source: _Binary, target: _Binary, size: int) -> int:
    """Copy `size` bytes in blocks, each within the timeout; returns how many were not there."""
    while size and (block := source.read(min(size, _BLOCK))):
        target.write(block)
        size -= len(block)
    return size


def host_for_others() -> str:
    """A name or number by which the other processes of the run reach this process's host."""
    from jaxpipe.core.jax_internals import distributed_state

    state = distributed_state()
    if state.coordinator_address is None:
        return "localhost"
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    if state.process_id == 0:
        return host  # they have met there
    kind, *_, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0]
