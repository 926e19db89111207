"""Hosts that stall change no number: all devices run collectives across processes in one order.

`STALLED_RUNS=100` repeats the runs, each with stalls at other times.
"""

import os

import numpy as np
import pytest
from commands import SMALL, metrics, train_command
from several import busy, ends, stalling, start_all

from jaxpipe import train

DEVICES = 8
RUNS = int(os.environ.get("STALLED_RUNS", "1"))
SIZES = ["train.steps=24", "train.eval_every=4", "checkpoint.every=6", "log.bubble_every=5"]
NAMES = ("loss", "loss_max", "grad_norm", "eval_loss")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Return the log of a run by one process."""
    directory = tmp_path_factory.mktemp("calm")
    assert train.main([str(SMALL), f"run.dir={directory}", *SIZES]) == 0
    return metrics(directory)


@pytest.fixture(scope="module")
def _load():
    """Occupy a core."""
    others = busy(1)
    yield
    for process in others:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.usefixtures("_load")
def test_stalls_change_no_number(calm, tmp_path, count, seed):
    """With 4 processes of 2 devices, pp's first group is also the first device of each of them."""
    command = train_command(tmp_path / "run", *SIZES, devices=DEVICES // count)
    for code, output in ends(start_all(count, command, stalling(tmp_path, seed))):
        assert code == 0, output
    found = metrics(tmp_path / "run")
    assert list(found) == list(calm)
    for step, line in found.items():
        for name in NAMES:
            want = calm[step].get(name)
            assert (name in line) == (want is not None)
            if want is not None:
                np.testing.assert_allclose(line[name], want, rtol=1e-6, err_msg=f"{name} {step}")
