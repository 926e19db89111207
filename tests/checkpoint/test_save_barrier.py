"""Processes end a save together: all write, or all go on without it."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from several import ends, start_all

from jaxpipe.checkpoint.orbax_port.save_barrier import SaveBarrier
from jaxpipe.runtime import processes

START, END, WRITTEN, COMMITTED = (
    "x:set_value_start", "x:set_value_end", "_async_write_complete.5", "_async_commit_complete.5",
)  # fmt: skip
COUNT = 3


@pytest.fixture
def barriers(monkeypatch):
    """Barriers of three processes, which are threads here."""
    monkeypatch.setattr(processes, "place", lambda: (0, COUNT))
    board = {}

    def barrier(index):
        return SaveBarrier(
            lambda key, text: board.__setitem__(index, text), lambda key: dict(board)
        )

    return [barrier(index) for index in range(COUNT)]


def save(barrier, fails_at=None, timeout_ms=20_000):
    """Go through a save as Orbax does; return what was raised."""
    barrier.begin()
    barrier(key=START, timeout_ms=timeout_ms)
    barrier(key=END, timeout_ms=timeout_ms)
    raised = None
    try:
        for place in (WRITTEN, COMMITTED):
            if place == fails_at:
                raise OSError("no space left")
            barrier(key=place, timeout_ms=timeout_ms)
    except OSError as error:
        raised = str(error)
    barrier(key=START, timeout_ms=timeout_ms)
    barrier(key=END, timeout_ms=timeout_ms)
    return raised


@pytest.mark.parametrize("fails_at", [WRITTEN, COMMITTED])
@pytest.mark.parametrize("which", range(COUNT))
def test_where_one_fails_all_do_and_the_next_save_succeeds(barriers, which, fails_at):
    with ThreadPoolExecutor(COUNT) as pool:
        for fails in (None, fails_at, None):
            where = [fails if index == which else None for index in range(COUNT)]
            raised = list(pool.map(save, barriers, where))
            if fails is None:
                assert raised == [None] * COUNT
            else:
                assert raised.pop(which) == "no space left"
                assert raised == ["another process could not write its part"] * (COUNT - 1)


def test_one_that_does_not_come_is_waited_for_so_long(barriers):
    barriers[0].begin()
    with pytest.raises(TimeoutError, match=f"2 processes have not reached '{WRITTEN}'"):
        barriers[0](key=WRITTEN, timeout_ms=200)


SCRIPT = """
import sys
from pathlib import Path
from jaxpipe.runtime import processes
from jaxpipe.runtime.environment import use_cpu_devices
use_cpu_devices(1)
processes.join()
import jax
import numpy as np
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.checkpoint.orbax_port import handler
from jaxpipe.core.mesh import Sharding, StageLayout, make_mesh

asynchronous, failing = sys.argv[2] == "background", [int(sys.argv[3])]
write = handler.write_checksums

def on_a_full_disk(directory, process=-1):  # -1: the first merges the files of all
    if directory.name and failing and process == failing[0]:
        failing.pop()
        raise OSError(28, "No space left on device")
    write(*(directory, process)[: 1 + (process >= 0)])

handler.write_checksums = on_a_full_disk
layout, mesh = StageLayout((1, 1)), make_mesh(2, 1, devices=jax.devices())
sharding = Sharding(mesh)
params = {"embed_head": {"embed": np.ones((12, 8), np.float32)},
          "layers": layout.stack([{"w": np.ones((6, 4), np.float32)}] * 2)}
put = lambda leaf, how: jax.make_array_from_callback(leaf.shape, how, lambda i: leaf[i])
state = {"params": jax.tree.map(put, params, sharding.named_shardings(params))}
keying = StateKeying(layout, sharding)
with CheckpointStore(Path(sys.argv[1]), keep=3, asynchronous=asynchronous, keying=keying) as store:
    for step in (1, 2, 3):
        store.save(step, state, {"position": step})
    store.wait()
    print("steps", store.steps, flush=True)
processes.finish()
"""


@pytest.mark.extended
@pytest.mark.versions  # the barrier reads names that Orbax does not document
@pytest.mark.slow(unless=["background-second"])
@pytest.mark.parametrize("fails", [0, 1, -1], ids=["first", "second", "commit"])
@pytest.mark.parametrize("how", ["background", "foreground"])
def test_a_disk_that_is_full_for_one_process_costs_one_save(tmp_path, how, fails):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), how, str(fails)]
    found = ends(start_all(2, command))
    for code, output in found:
        assert code == 0, output
        assert "steps [2, 3]" in output
        assert "a checkpoint could not be written" in output
