"""The cost of residuals offloaded to the host: their bytes, and the time of their copies."""

import json
from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.plan import main
from jaxpipe.planning import Devices, Hardware, advise, analytic, arrange, estimate, op_seconds
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import Copies

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SIZES = ("parallel.pp=2", "parallel.dp=1", "model.n_layers=8", "train.grad_accum_steps=8",
         "parallel.transfer_ticks=1")  # fmt: skip


def priced(layers, *overrides, host=50e9):
    """Return a configuration with four layers per stage, its op seconds, and its estimate."""
    config = configs.load(SMALL, [*SIZES, f"train.offload_layers={layers}", *overrides])
    seconds = analytic(config, Hardware(host=host))
    return config, seconds, estimate(arrange(config), seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_what_the_device_gives_the_host_has(schedule):
    one = {n: priced(n, f"parallel.schedule={schedule}")[2].bytes for n in range(5)}
    layer = one[1].host
    for layers, held in one.items():
        assert held.host == layers * layer
        assert held.activations + held.host == one[0].activations
        # With copies no F runs beside a gradient, so less is computed with at once.
        assert held.total - held.working == one[0].total - one[0].working - held.host


def test_the_stash_is_counted_on_the_device():
    config, _, none = priced(0, "parallel.schedule=zb_h1")
    _, _, every = priced(4, "parallel.schedule=zb_h1")
    layer, slots = costs_of(config).kinds["layer"], none.plan.tables.slots
    assert every.bytes.host == 4 * (slots.for_b * layer.for_b + slots.for_w * layer.for_w)
    messages = every.bytes.activations - 4 * slots.stash * layer.stash
    assert messages == (slots.inbox + 3) * costs_of(config).message
    assert every.bytes.activations < none.bytes.activations


def in_turn(copies, copy, compute, count):
    """Return when F of consecutive layers and their consecutive copies have both ended."""
    now = copied = 0.0
    for layer in range(count):
        now += compute
        if layer < copies.layers:
            copied = max(copied, now) + copy
    return max(now, copied)


@pytest.mark.parametrize("copy", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("layers", range(5))
def test_seconds_of_layers_with_copies(layers, copy):
    copies = Copies(layers, F=copy, B=copy, W=copy)
    assert copies.beside(copy, 1.0, 4) == pytest.approx(in_turn(copies, copy, 1.0, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compute_waits_for_a_slow_host_alone(schedule):
    named = f"parallel.schedule={schedule}"
    _, seconds, fast = priced(3, named, host=1e15)
    _, _, without = priced(0, named)
    assert fast.waiting == 0
    assert fast.seconds == without.seconds
    assert seconds.costs((4, 4)) == priced(0, named)[1].costs((4, 4))
    _, _, slow = priced(3, named, host=1e6)
    assert slow.waiting == pytest.approx(slow.seconds - without.seconds)
    assert slow.waiting > 0


def test_advice_names_the_most_layers_whose_copies_hide():
    config, seconds, _ = priced(4)
    layer = costs_of(config).kinds["layer"]
    # In F a copy takes as long as compute: all but that of the last layer overlap.
    equal = (layer.for_b + layer.for_w) / seconds.layer.F
    config, seconds, one = priced(4, host=equal)
    (sentence,) = advise(config, [one], memory=80e9, bubble=None).sentences
    assert "1f1b: compute waits for copies with the host" in sentence
    assert "(train.offload_layers=4); those of 3 layers would be hidden." in sentence
    config, seconds, one = priced(3, host=equal)
    assert advise(config, [one], memory=80e9, bubble=None).sentences == ()


def test_copies_are_computed_where_ops_are_measured(tmp_path):
    costs = tmp_path / "ops.json"
    costs.write_text('{"seconds": {"layer": {"F": 1, "B": 1, "W": 1}, "head": 0, "transfer": 0}}')
    config = configs.load(SMALL, [*SIZES, "train.offload_layers=2", f"parallel.costs={costs}"])
    found = op_seconds(config, Hardware(host=1e9))
    assert found.layer.F == 1
    assert found.copies == analytic(config, Hardware(host=1e9)).copies
    layer = costs_of(config).kinds["layer"]
    assert found.copies.F == found.copies.B == pytest.approx((layer.for_b + layer.for_w) / 1e9)
    assert pytest.approx(layer.for_w / 1e9) == found.copies.W


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.offload_layers=5"], "train.offload_layers=5 exceeds the layers of the shortest "),
        (["train.offload_layers=3", "parallel.schedule=zbv"], "shortest stage, 2: every rank"),
        (["train.offload_layers=4", "parallel.memory_limit=1GB"], "all of it waits on the host"),
        (["train.offload_layers=-1"], "train.offload_layers"),
    ],
)
def test_what_is_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolved(configs.load(SMALL, [*SIZES, "runtime.cpu_devices=2", *overrides]))


def test_a_limit_counts_what_stays_on_the_device():
    """Half of the layers on the host: twice as many microbatches within the same bytes."""
    held = []
    for layers in (0, 2):
        config, _, one = priced(layers, "parallel.in_flight=4")
        layer = costs_of(config).kinds["layer"]
        limit = (4 - layers) * (layer.for_b + layer.for_w) * one.live
        held.append(one.live)
        for size, fits in ((limit, True), (limit - 1, False)):
            config = configs.load(SMALL, [
                *SIZES, "parallel.in_flight=4", f"train.offload_layers={layers}",
                f"parallel.memory_limit={size}B",
            ])  # fmt: skip
            if fits:
                assert arrange(config, Devices()).schedule
            else:
                with pytest.raises(ValueError, match="memory_limit"):
                    arrange(config, Devices())
    assert held[0] == held[1]


def test_pairs_do_without_the_host():
    config = configs.load(SMALL, [*SIZES, "parallel.schedule=dualpipe"])
    assert arrange(config, Devices()).tables.pairs
    config, _, one = priced(1, "parallel.schedule=dualpipe")
    assert not arrange(config, Devices()).tables.pairs
    assert one.bytes.host > 0


@pytest.mark.slow
def test_the_command_shows_the_host(capsys, tmp_path):
    arguments = [str(SMALL), *SIZES]
    assert main([*arguments, "--json", "train.offload_layers=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    own = next(row for row in plan["schedules"] if row["configured"])
    assert own["bytes"]["host"] > 0
    assert own["waiting_for_host"] >= 0
    assert plan["seconds"]["copies"]["layers"] == 2
    machine = tmp_path / "slow.toml"
    machine.write_text('host = "1MB"\n')
    assert main([*arguments, "--machine", str(machine), "train.offload_layers=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[-1] == "host"
    assert "would be hidden" in shown
    assert main(arguments) == 0
    assert "host" not in capsys.readouterr().out
