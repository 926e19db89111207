"""An HTTP server inside a run's process, which strangers cannot make spend what the run needs.

It shares threads and file descriptors with training, and whoever reaches the host may connect to
it. So a connection gets a thread only when its request's headers are there and are admitted, few
connections wait for that, and none for long.
"""

import contextlib
import selectors
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler

_MOST_WAITING = 32  # connections without admitted headers; then the oldest is closed
_SECONDS = 5.0  # in which a connection must send its headers
_MOST_BYTES = 16 << 10  # of headers
_LOOK_SECONDS = 0.1
_FORBIDDEN = b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedServer(socketserver.TCPServer):
    """Answers requests by a handler, in threads, until it is closed.

    Args:
      port: to listen at, for IPv4 and IPv6; 0: any that is free.
      handler: of a request.
      most_threads: requests that are handled at once; others wait.

    Raises:
      OSError: the port cannot be used.
    """

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler], most_threads: int):
        super().__init__(("", port), handler)
        self._waiting: dict[socket.socket, float] = {}  # deadlines, the oldest connection first
        self._refused: set[socket.socket] = set()  # have their answer, and may still be sending
        self._threads, self._over = threading.Semaphore(most_threads), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Listen for IPv4 and IPv6."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def admits(self, headers: bytes) -> bool:
        """Whether a request with these headers is handled."""
        return True

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self.server_address[1]

    def close(self) -> None:
        """Stop serving."""
        self._over.set()
        self._thread.join()
        self.server_close()

    def _serve(self) -> None:
        self.socket.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self.socket, selectors.EVENT_READ)
            while not self._over.is_set():
                # A connection is selected once: one that sends its headers in pieces is looked at
                # from time to time.
                for key, _ in ready.select(_LOOK_SECONDS):
                    if key.fileobj is self.socket:
                        self._accept(ready)
                    else:
                        ready.unregister(key.fileobj)
                for connection in list(self._waiting):
                    if not self._look(connection):
                        with contextlib.suppress(KeyError, ValueError):  # no longer there
                            ready.unregister(connection)
                        self._waiting.pop(connection, None)
                        self._refused.discard(connection)
            for connection in self._waiting:
                connection.close()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, _ = self.socket.accept()
        except OSError:  # it is gone again, or the process has no descriptor left
            time.sleep(_LOOK_SECONDS)
            return
        if len(self._waiting) >= _MOST_WAITING:
            oldest = next(iter(self._waiting))
            self._waiting[oldest] = -float("inf")
        connection.setblocking(False)
        self._waiting[connection] = time.monotonic() + _SECONDS
        ready.register(connection, selectors.EVENT_READ)

    def _look(self, connection: socket.socket) -> bool:
        """Handle a request whose headers are there; return whether to look again."""
        late = time.monotonic() > self._waiting[connection]
        try:
            if connection in self._refused:  # read on, since closing would reset its answer
                more = connection.recv(_MOST_BYTES)
            else:
                more = connection.recv(_MOST_BYTES, socket.MSG_PEEK)
                head, end, _ = more.partition(b"\r\n\r\n")
                if end and self.admits(head):
                    if self._threads.acquire(blocking=False):
                        self._handle(connection)
                        return False
                elif end:
                    connection.sendall(_FORBIDDEN)
                    connection.shutdown(socket.SHUT_WR)
                    self._refused.add(connection)
                elif len(more) == _MOST_BYTES:
                    late = True
        except BlockingIOError:
            more = b"."
        except OSError:
            more = b""
        if late or not more:
            connection.close()
            return False
        return True

    def _handle(self, connection: socket.socket) -> None:
        def work() -> None:
            try:
                connection.setblocking(True)
                with contextlib.suppress(OSError):  # whoever asked reports that it got no answer
                    self.finish_request(connection, connection.getpeername())
            finally:
                self._threads.release()
                self.shutdown_request(connection)

        threading.Thread(target=work, daemon=True).start()
