"""Planned cost of replicas that share sequences: bytes, and time for which compute waits."""

import json
from pathlib import Path

import pytest

from jaxpipe.config import load
from jaxpipe.plan import main
from jaxpipe.planning import Hardware
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.hardware import NO_EXCHANGE, LayerSeconds, sharing_of

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
HYBRID = Path(__file__).parents[2] / "configs" / "quickstart_hybrid.toml"
SHARED = ["parallel.pp=2", "parallel.dp=2", "parallel.cp=2", "train.seq_len=256"]


def hosts_of_one(network, **more):
    return Hardware(per_host=1, link=1e15, network=network, network_latency=0.0, **more)


@pytest.mark.slow(unless=["2-*"])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("heads", [0, 1, 2, 4])
def test_compute_waits_for_all_that_nothing_hides(heads, slices):
    method = f"parallel.cp_method={'ring' if heads else 'gather'}"
    how = [method, f"parallel.cp_heads={max(heads, 1)}", f"parallel.slices={slices}"]
    config = load(SMALL, [*SHARED, "parallel.dp=4", "parallel.cp=4", *how])
    layer, slow = costs_of(config).kinds["layer"], hosts_of_one(1e6)
    found, behind = sharing_of(config, slow), 0.0
    if ring := 4 // heads if heads else 0:  # causal attention, two products, not of own keys
        model, tokens = config.model, config.train.microbatch_size * 256 / (4 * slices)
        flops = 2 * model.n_heads * model.head_size * 256 * tokens * (1 - 1 / ring)
        behind = flops / slow.attention_flops
    assert pytest.approx(layer.shared["F"] / 0.85e6 - behind) == found.F
    assert pytest.approx(layer.shared["B"] / 0.85e6 - 2.5 * behind) == found.B
    assert found.W == 0
    free = sharing_of(config, hosts_of_one(1e15, speed=1e-3))
    assert (free.F == 0) == (heads == 1)
    assert pytest.approx((layer.shared["F"] - layer.turned["F"]) / 0.85e15) == free.F


def test_a_recurrence_sends_what_does_not_grow_with_the_sequence():
    """The summary of a shard's state, and the inputs of three convolutions, to three others."""
    alone = ["parallel.pp=1", "parallel.dp=4", "parallel.schedule=1f1b", "parallel.cp=4"]
    for length in (128, 512):
        config = load(HYBRID, [*alone, f"train.seq_len={length}"])
        layer, model, rows = costs_of(config).kinds["linear_layer"], config.model, 4
        key, value = model.delta_key_dim, model.delta_value_dim
        keys, values = model.delta_widths
        summary = model.delta_value_heads * key * (key + value)
        inputs = (model.delta_taps - 1) * (2 * keys + values)
        assert layer.shared["F"] == layer.shared["B"] == 3 * rows * 4 * (summary + inputs)
        assert (layer.calls["shared"]["F"], layer.shared["W"]) == (4, 0)


def test_nobody_waits_alone():
    assert sharing_of(load(SMALL), Hardware()) == NO_EXCHANGE


def test_measured_seconds_of_bw_wait_too():
    more = LayerSeconds(F=1.0, B=2.0, W=0.5)
    assert LayerSeconds(1.0, 1.0, 1.0).beside(more) == LayerSeconds(2.0, 3.0, 1.5)
    assert LayerSeconds(1.0, 1.0, 1.0, BW=1.5).beside(more).whole_backward == 4.0


@pytest.mark.slow
def test_a_plan_says_what_is_sent_and_waited_for(capsys, tmp_path):
    machine = tmp_path / "slow.toml"
    machine.write_text('per_host = 1\nnetwork = "1MB"\n')
    arguments = [str(SMALL), *SHARED, "parallel.cp_method=ulysses", "--machine", str(machine)]
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ulysses over cp=2: MiB that a device sends for a layer and microbatch: 0." in said
    assert "stored exposed" in said
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["schedules"]
    assert all(row["waiting_for_replicas"] > 0 for row in rows)
