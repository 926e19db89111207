"""The bytes that this process's connections to object stores have moved, as the kernel counts them.

A library of a store counts a file when it is finished. The kernel counts the bytes that the other
end has received, and so tells a slow transfer from one that stands still.
"""

import contextlib
import os
import socket
import struct
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

_BYTES = struct.Struct("=QQ")  # acknowledged by the other end, and received from it
_OFFSET = 120  # of these two in Linux's `struct tcp_info`
_ADDRESSES = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST"
)  # fmt: skip


def bytes_to_stores(*, python: bool) -> list[tuple[int, int, int]]:
    """The descriptor of each connection to a store or a proxy, and its bytes sent and received.

    Empty where the system does not tell them. A byte that was sent counts when the other end has
    acknowledged it.

    Args:
      python: whether to include the connections of fsspec, which are Python's.
    """
    ports, own, found = _ports(), set() if python else _of_fsspec(), []
    with contextlib.suppress(OSError):  # only Linux has the folder
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in own:
                with contextlib.suppress(OSError, struct.error):  # no socket, or it was just closed
                    found += _moved(descriptor, ports)
    return found


def _moved(descriptor: int, ports: set[int]) -> list[tuple[int, int, int]]:
    link = socket.socket(fileno=descriptor)
    try:
        if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
            return []
        if link.getpeername()[1] not in ports:
            return []
        about = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _BYTES.size)
        return [(descriptor, *_BYTES.unpack_from(about, _OFFSET))]
    finally:
        link.detach()  # it belongs to the library


def _ports() -> set[int]:
    """The ports of stores and proxies."""
    addresses = [os.environ.get(name, "") for name in _ADDRESSES] + list(getproxies().values())
    ports = {80, 443}
    for address in addresses:
        with contextlib.suppress(ValueError):
            ports.add(urlsplit(address).port or 443)
    return ports


def _of_fsspec() -> set[int]:
    """The descriptors in the event loop of fsspec: asyncio has no documented function for them."""
    if "fsspec.asyn" not in sys.modules:
        return set()
    from fsspec.asyn import loop

    while loop[0]:
        with contextlib.suppress(RuntimeError):  # another thread has changed it meanwhile
            return set(loop[0]._selector.get_map())
    return set()
