"""Devices that flip a bit: found and named, with evidence kept; devices alike raise no alarm."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL, complete, losses, metrics, train_command
from jax import lax
from routed import batch_at, run, trainer_of
from several import ends, start_all
from test_spikes import printing, until

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.core.executor import program
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.run import corruption
from jaxpipe.run.corruption import CorruptionCheck, outvoted
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.group import Group

HOW = [
    "parallel.pp=2", "parallel.dp=2", "optimizer.decay=constant", "train.deterministic=true",
    "train.corruption_check_every=3", "checkpoint.every=2",
]  # fmt: skip


def flipping(monkeypatch, victim, orders=(0, 1, 2), bit=12):
    """Let a device flip a bit of its own gradient sums in these orders of the devices."""
    at, real_program, real_ticks = [], corruption.gradient_program, program.run_ticks
    first = jax.devices()[0].id

    def program_of(trainer):
        if trainer.mesh.devices.flat[0].id - first in orders:
            at.extend(i for i, d in np.ndenumerate(trainer.mesh.devices) if d.id == victim)
        return real_program(trainer)

    def ticks(work, carry, *more):
        carry = real_ticks(work, carry, *more)
        if not at:
            return carry
        axes = ("pp", "rp", "dp", "ep", "tp")
        is_hit = jnp.stack([lax.axis_index(a) == i for a, i in zip(axes, at.pop())]).all()
        leaves, tree = jax.tree.flatten(carry.layer_gradients)
        words = lax.bitcast_convert_type(leaves[0], jnp.uint32)
        flipped = words.reshape(-1).at[0].set(words.reshape(-1)[0] ^ (is_hit << bit))
        leaves[0] = lax.bitcast_convert_type(flipped.reshape(words.shape), leaves[0].dtype)
        return carry._replace(layer_gradients=jax.tree.unflatten(tree, leaves))

    monkeypatch.setattr(corruption, "gradient_program", program_of)
    monkeypatch.setattr(program, "run_ticks", ticks)


@cache
def trainer():
    return trainer_of(*HOW)


@pytest.mark.extended
def test_a_run_stops_at_a_device_that_flips_a_bit(tmp_path, monkeypatch):
    """It flips in every order; the run has found nothing wrong in steps 1 and 2."""
    flipping(monkeypatch, victim=2)
    own = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    code, said = printing(until(7, trainer()), own)
    assert code == ExitCode.CORRUPTION
    assert said[-1].startswith(
        "error: the gradients of step 3 have other bits on other devices, at 3 of 4 places of the "
        "mesh: device 2 (process 0, pp=1 dp=0) computes wrong numbers, which two others contradict"
    )
    assert (complete(own), list(metrics(own))) == ([2], [1, 2])
    (kept,) = tmp_path.glob("runs/*/corruption/step-3")
    report = json.loads((kept / "report.json").read_text())
    assert report["wrong_devices"] == [2]
    assert report["orders"] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]
    assert "jax" in report
    shards = np.load(kept / "process-0.npz")
    batch = batch_at(2 * 16, 4, 4)
    np.testing.assert_array_equal(shards["batch/inputs/device-0"], batch["inputs"][:, :2])
    assert any(name.startswith("gradients-2/layers/0/") for name in shards)


@pytest.mark.slow
def test_a_device_that_flips_a_bit_once_is_named_and_the_run_may_go_on(tmp_path, monkeypatch):
    """The check changes no number of the run."""
    monkeypatch.chdir(tmp_path)
    unchecked = until(4, trainer(), corruption_check_every=0)
    assert run(unchecked, tmp_path / "good") == 0
    flipping(monkeypatch, victim=1, orders=[1], bit=0)
    going = until(4, trainer(), on_corruption="warn")
    code, said = printing(going, tmp_path / "warned")
    assert code == 0
    (warning,) = [line for line in said if line.startswith("warning: the gradients of step 3")]
    assert "at 1 of 4 places of the mesh: device 1 (process 0, pp=0 dp=1) computes" in warning
    good, warned = (metrics(tmp_path / name) for name in ("good", "warned"))
    assert [line["loss"] for line in good.values()] == [line["loss"] for line in warned.values()]


@pytest.mark.extended
def test_devices_alike_raise_no_alarm():
    """Forty checks, each with other parameters."""
    check, state = CorruptionCheck(trainer(), Group(), lambda _: None), trainer().init()
    for step in range(40):
        batch = trainer().put(batch_at(step, 4, 4))
        assert check.find(step, state, batch) == ""
        state, _ = trainer().train_step(state, batch)


@pytest.mark.slow
def test_several_processes_check_together(tmp_path):
    """Devices of other processes take each other's places; numbers are those without checks."""
    sizes = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "train.steps=5"]
    how = ["train.deterministic=true", "train.eval_every=0"]
    assert train.main([str(SMALL), f"run.dir={tmp_path / 'one'}", *sizes, *how]) == 0
    checked = [*sizes, *how, "train.corruption_check_every=2"]
    for code, output in ends(start_all(2, train_command(tmp_path / "two", *checked, devices=4))):
        assert code == 0, output
    assert not (tmp_path / "two" / "corruption").exists()
    one, two = (list(losses(tmp_path / name).values()) for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-6)


@pytest.mark.parametrize(
    ("results", "want"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]], [2]),  # once, in the third order
        ([[1, 9, 3, 4], [8, 2, 3, 4], [1, 2, 3, 7]], [1]),  # device 1 in every order
        ([[1, 9, 8, 4], [7, 2, 3, 6], [1, 2, 3, 5]], [1]),  # and what it spoils
        ([[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]], []),
    ],
)
def test_who_is_outvoted(results, want):
    devices = np.array([[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]])
    assert outvoted(np.array(results), devices) == want


def test_two_devices_cannot_be_checked():
    how = ["train.corruption_check_every=2", "train.deterministic=true"]
    with pytest.raises(ConfigError, match="but there is 2 devices: change it"):
        check_settings(configs.load(SMALL, [*how, "parallel.pp=2", "parallel.dp=1"]))
