"""A run that measures its own ops: on its mesh, once, and the schedule that follows from them."""

from types import SimpleNamespace

import jax
import msgspec
import pytest
from commands import SMALL, metrics

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.planning import (
    Devices,
    Hardware,
    LayerSeconds,
    OpSeconds,
    analytic,
    arrange,
    op_seconds,
    own_costs,
    read_own,
    resolve,
    write_own,
)
from jaxpipe.planning.cost import machine
from jaxpipe.run.measure import measured_costs, op_timers
from jaxpipe.runtime import processes
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

HOW = ("parallel.costs=measure", "parallel.schedule=zbv", "parallel.pp=2", "parallel.dp=1")
CPUS = Devices("cpu", count=2)
SECONDS = OpSeconds(LayerSeconds(F=1.0, B=2.0, W=0.25), head=0.5, transfer=0.0625)


def with_links(seconds, replicas=1):
    """Return measured seconds with those of links and memory, which a data sheet gives."""
    card = Hardware()
    ring = card.ring(1.0, machine.Group(replicas, replicas), calls=0)
    links = {"network": ring, "shards": ring, "host": 1 / card.host, "memory": card.copying(1.0)}
    return msgspec.structs.replace(seconds, **links)


def load(directory, *more):
    return configs.load(SMALL, [f"run.dir={directory}", *HOW, *more])


@pytest.mark.slow
def test_a_run_measures_before_its_first_step_and_goes_on_with_the_same(tmp_path, capsys):
    """The second start finds the file, so it runs the schedule of the first."""
    command = [str(SMALL), f"run.dir={tmp_path}", *HOW, "parallel.dp=4"]
    assert train.main([*command, "train.steps=2"]) == 0
    said = capsys.readouterr().out
    assert "ops measured on this mesh, in ms of a layer: F " in said
    assert "zbv, searched for these seconds; a step by the simulator: " in said
    config = load(tmp_path)
    seconds = read_own(config)
    assert min(seconds.layer.F, seconds.layer.B, seconds.layer.W, seconds.transfer) > 0
    assert op_seconds(config) == with_links(seconds)
    assert arrange(config).schedule == arrange(config, seconds=seconds).schedule
    written = own_costs(config).read_text()
    assert train.main([*command, "train.steps=3"]) == 0
    assert f"ops were measured before: {own_costs(config)}" in capsys.readouterr().out
    assert own_costs(config).read_text() == written
    assert sorted(metrics(tmp_path)) == [1, 2, 3]


def test_until_then_and_for_other_sizes_a_data_sheet_stands_in(tmp_path):
    config = load(tmp_path)
    assert read_own(config) is None
    assert op_seconds(config) == analytic(config, Hardware())
    write_own(config, SECONDS)
    assert read_own(config) == SECONDS
    assert op_seconds(config) == with_links(SECONDS)
    replicated = load(tmp_path, "parallel.dp=4", "train.grad_accum_steps=8")
    assert op_seconds(replicated) == with_links(SECONDS, replicas=4)
    for other in ("parallel.tp=2", "train.microbatch_size=2", "model.d_ff=96", "train.remat=full"):
        assert read_own(load(tmp_path, other)) is None
    own_costs(config).write_text('{"seconds": {"layer": 1}}')
    with pytest.raises(ConfigError, match=r"cannot read op seconds from .*costs.json"):
        op_seconds(config)


def test_what_measuring_gained_is_by_the_simulator(tmp_path, monkeypatch):
    """Ops very different from a data sheet's lead to another order, with a shorter span."""
    config = load(tmp_path, "train.grad_accum_steps=6", "parallel.objective=span")
    monkeypatch.setattr(measured_costs, "_measure_ops", lambda trainer: SECONDS)
    before = resolve(config, CPUS)
    found, message = measured_costs.measure(before, Group())
    first, second = message.splitlines()
    assert first.startswith("ops measured on this mesh, in ms of a layer: F 1e+03, B 2e+03, W 250")
    assert found.seconds == with_links(SECONDS)
    assert found.schedule == resolve(config, CPUS).schedule != before.schedule
    gained = float(second.partition(" s, ")[2].split("%")[0])
    assert gained > 0
    assert measured_costs.measure(found, Group())[1].startswith("ops were measured before: ")
    plain = load(tmp_path / "plain", "parallel.schedule=1f1b")
    _, message = measured_costs.measure(resolve(plain, CPUS), Group())
    assert "1f1b has one order, whatever ops cost; " in message


def test_process_0_reads_for_the_others(tmp_path, monkeypatch):
    """This process has no file: its directory is on another host."""
    sent = msgspec.json.encode(SECONDS).decode()
    service = SimpleNamespace(index=1, count=2, gather=lambda name, text: [sent, text])
    monkeypatch.setattr(processes, "_met", [SimpleNamespace(service=service)])
    assert op_seconds(load(tmp_path)) == with_links(SECONDS)
    assert op_seconds(load(tmp_path, f"parallel.costs={tmp_path}/none.json")) == with_links(SECONDS)


def test_costs_that_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(measured_costs, "_measure_ops", lambda trainer: SECONDS)
    with pytest.raises(ConfigError, match=r"costs.json cannot be written \(File exists\)"):
        measured_costs.measure(resolve(load(tmp_path / "file"), CPUS), Group())


@pytest.mark.extended
def test_ops_of_layers_with_losses_of_their_own(tmp_path):
    """F and the gradient ops of a layer with experts also compute the losses of its router."""
    experts = ("n_experts=2", "experts_per_token=1", "d_expert=16", "router_aux_loss=0.01")
    of_model = [f"model.{field}" for field in ("n_layers=1", *experts)]
    config = load(tmp_path, "parallel.pp=1", "parallel.schedule=gpipe", *of_model)
    trainer = Trainer(resolve(config, Devices("cpu")), jax.devices()[:1])
    seconds = op_timers.op_seconds(trainer, repeats=1)
    assert all(seconds["layer"][op] > 0 for op in ("F", "B", "W", "BW"))
