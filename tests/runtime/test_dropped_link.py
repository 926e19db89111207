"""Two hosts whose link is cut: each process ends by itself and names the one that is cut off."""

import subprocess
import time

import pytest
from commands import start, train_command
from hosts import linked_hosts
from several import ends, wait_for_step

TIMEOUT, ALLOWED = 6, 10  # seconds


@pytest.fixture
def hosts():
    try:
        with linked_hosts() as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


@pytest.mark.slow
def test_a_dropped_link_ends_both_processes(hosts, tmp_path):
    """The run directory is on a disk that both still reach."""
    line = train_command(
        tmp_path, "parallel.pp=2", "parallel.dp=1", "train.eval_every=0", "train.steps=100000",
        f"runtime.hang_timeout={TIMEOUT}", "log.tensorboard=false", devices=1,
    )  # fmt: skip
    places = {"JAX_COORDINATOR_ADDRESS": f"{hosts.addresses[0]}:4567", "JAX_NUM_PROCESSES": "2"}
    group = [
        start(hosts.command(index, line), places | {"JAX_PROCESS_ID": str(index)})
        for index in range(2)
    ]
    wait_for_step(tmp_path, 10)
    since = time.monotonic()
    hosts.drop_link()
    found = ends(group)
    assert time.monotonic() - since < TIMEOUT + ALLOWED
    for index, (code, output) in enumerate(found):
        assert code == 5, output
        named = f"on {hosts.names[1]}, pp=1) runs, but has not reached process 0 over the network"
        assert named in output
        assert list(tmp_path.glob(f"hangs/*/process-{index}.txt"))
