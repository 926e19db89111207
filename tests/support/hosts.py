"""Two hosts on this machine: network namespaces of Linux with a link between them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

FILES = Path("/etc/netns")  # `ip netns exec` shows a namespace the files of its folder as /etc


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two linked hosts with addresses of their own; `names` are also their hostnames."""

    def __init__(self) -> None:
        self.names = [f"jaxpipe{os.getpid()}-{index}" for index in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def command(self, index: int, line: list[str]) -> list[str]:
        """Return the command that runs `line` on a host."""
        name = self.names[index]
        script = f'hostname {name}; exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, "sh", *line]

    def drop_link(self) -> None:
        """Drop every message between the hosts from now on."""
        _ip("-n", self.names[0], "link", "set", "link0", "down")


@contextlib.contextmanager
def linked_hosts() -> Iterator[Hosts]:
    """Make two hosts, and remove them after the body.

    Raises:
      OSError, subprocess.CalledProcessError: this machine or user cannot make namespaces.
    """
    hosts = Hosts()
    both = list(enumerate(zip(hosts.names, hosts.addresses)))
    try:
        for _, (name, address) in both:
            _ip("netns", "add", name)
            (FILES / name).mkdir(parents=True)
            (FILES / name / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        ends = ["link1", "netns", hosts.names[1]]
        _ip("-n", hosts.names[0], "link", "add", "link0", "type", "veth", "peer", "name", *ends)
        for index, (name, address) in both:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"link{index}")
            for device in ("lo", f"link{index}"):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(FILES / name, ignore_errors=True)
