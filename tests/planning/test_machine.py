"""Where mesh axes lie on hosts, the seconds of collectives, and the laws through measured rates."""

import json
from importlib.resources import files

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import config as configs
from jaxpipe.config import ConfigError, ParallelConfig
from jaxpipe.planning import Hardware, op_seconds
from jaxpipe.planning.cost import card
from jaxpipe.planning.cost.hardware import measured_for
from jaxpipe.planning.cost.kernels import Attention, Operations, Product
from jaxpipe.planning.cost.machine import Group, machine, machine_of
from jaxpipe.planning.cost.operations import operations_of
from jaxpipe.planning.published import Figure, compare, error, left_out, read_figures

SMALL = "tests/data/small.toml"
TABLE = json.loads(files("jaxpipe.planning.cost").joinpath("h100.json").read_text())


def axes(**sizes):
    return Hardware(per_host=8).axes(ParallelConfig(**sizes))


def test_axes_lie_as_the_mesh_orders_devices():
    """tp is fastest, then replicas, then pipeline ranks; `pipeline_first` is the other way."""
    found = axes(pp=4, dp=8, tp=4, cp=2, ep=8)
    assert found.tp == Group(4, 4)
    assert (found.cp, found.ep) == (Group(2, 2), Group(8, 2))
    assert found.pp == Group(4, 1)
    assert axes(dp=8, tp=4, ep=16, ep_over_tp=True).ep == Group(16, 8)
    assert axes(pp=4, dp=8, tp=4, ep=16, ep_over_tp=True, pipeline_first=True).ep == Group(16, 4)
    assert axes(pp=4, dp=1, tp=2).pp == Group(4, 4)
    near = axes(pp=2, dp=8, tp=2, pipeline_first=True)
    assert (near.pp, near.replicas) == (Group(2, 2), Group(8, 2))


def test_a_ring_over_whole_hosts_uses_all_their_network_cards():
    one = Hardware(link=400e9, network=10e9, link_latency=0.0, network_latency=0.0)
    alone, few, whole = (one.ring(1e9, Group(16, n)) for n in (1, 2, 8))
    assert alone == pytest.approx(2 * few) == pytest.approx(8 * whole)
    assert one.ring(1e9, Group(8, 8)) == pytest.approx(1e9 / (400e9 * 0.85))
    assert one.ring(1e9, Group(64, 8)) >= one.ring(1e9, Group(8, 8))  # at most NVLink
    assert one.ring(1e9, Group(1, 1)) == 0


def test_an_all_to_all_pays_for_what_leaves_the_host():
    one = Hardware(link=1e15, network=10e9, link_latency=0.0, network_latency=0.0)
    assert one.all_to_all(15.0, Group(16, 8)) == pytest.approx(8 / (10e9 * 0.85))
    assert one.all_to_all(7.0, Group(8, 8)) < 1e-9


def test_every_hop_has_a_latency():
    one = Hardware(link_latency=1.0, network_latency=100.0)
    assert one.ring(0.0, Group(16, 8), calls=3) == 3 * (7 * 1.0 + 1 * 100.0)


def test_machines_of_ones_own(tmp_path):
    assert machine("dgx-h100") == machine_of("H100") == Hardware()
    path = tmp_path / "mine.toml"
    path.write_text('device = "A100"\nper_host = 4\nnetwork = "12.5GB"\n')
    assert machine(str(path)) == Hardware("A100", per_host=4, network=12_500_000_000)
    for text, message in (
        ('network = "many"', "network: 'many' is not a size"),
        ("per_host = 0", "per_host=0 must be a number above 0"),
        ("hosts = 2", "unknown key 'hosts'"),
        ('device = "H3"', "unknown device 'H3'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            machine(str(path))
    with pytest.raises(ConfigError, match="unknown machine 'dgx': use one of dgx-h100"):
        machine("dgx")


def test_a_law_is_close_to_every_measured_product(monkeypatch):
    monkeypatch.setattr(card, "_SUSTAINED", 1.0)  # the table has short runs
    for entry in TABLE["products"]:
        sizes = [entry[name] for name in ("itemsize", "groups", "rows", "inner", "columns")]
        itemsize, groups, rows, inner, columns = sizes
        moved = groups * (itemsize * inner * (rows + columns) + 2 * rows * columns)
        one = Product(*sizes, bytes=moved)
        seconds = card.seconds_of(Operations({one: 1}), "H100")
        assert one.flops / seconds / 1e12 == pytest.approx(entry["tflops"], rel=0.12)


def test_a_law_is_close_to_every_measured_attention():
    rates = card.rates_of()
    for entry in TABLE["attention"]:
        one = Attention(entry["keys"], entry["width"], 1.0, entry["gradient"])
        assert 989 * rates.attended(one) == pytest.approx(entry["tflops"], rel=0.05)


def test_entries_say_where_they_were_measured():
    assert all(entry["source"] for kind in ("products", "attention") for entry in TABLE[kind])


def test_kernels_of_a_norm_and_a_product():
    """A row's norm is one kernel that reads and writes the rows; the product reads the result."""

    def layer(x, weight):
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))
        return x @ weight

    shapes = jnp.ones((64, 512)), jnp.ones((512, 256))
    found = operations_of(jax.make_jaxpr(layer)(*shapes).jaxpr)
    assert found.moved == 2 * 64 * 512 * 4
    assert found.launches == 2
    product = Product(4, 1, 64, 512, 256, bytes=4 * (64 * 512 + 512 * 256 + 64 * 256))
    assert found.products == {product: 1}
    added = operations_of(jax.make_jaxpr(layer)(*shapes).jaxpr, adds=True)
    assert added.products == {product._replace(bytes=product.bytes + 4 * 64 * 256): 1}


def test_loops_and_branches_count():
    def looped(x):
        step = lambda x, _: (jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x), None)  # noqa: E731
        return jax.lax.scan(step, x, length=3)[0]

    found = operations_of(jax.make_jaxpr(looped)(jnp.ones((8, 8))).jaxpr)
    assert found.flops() == 3 * 2 * 2 * 8**3


def test_measurements_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "ops.json"
    config = configs.load(SMALL, [f"parallel.costs={path}"])
    seconds = {"layer": {"F": 1, "B": 1, "W": 1}, "head": 0, "transfer": 0}
    path.write_text(json.dumps({"of": measured_for(config), "seconds": seconds}))
    assert op_seconds(config).layer.F == 1
    other = configs.load(SMALL, [f"parallel.costs={path}", "train.remat=full"])
    with pytest.raises(ConfigError, match="measured with train.remat='none', and this is"):
        op_seconds(other)
    deeper = configs.load(SMALL, [f"parallel.costs={path}", "model.n_layers=8"])
    assert op_seconds(deeper).layer.F == 1


def test_every_published_figure_has_a_source_a_machine_and_a_factor_of_three():
    figures = read_figures()
    for figure in figures:
        assert figure.source
        assert machine(figure.machine)
    systems = [figure.system for figure in figures]
    assert all(systems.count(name) >= 3 for name in systems)


@pytest.mark.slow
def test_published_figures_are_met():
    """The numbers that the README states; a factor is the median of its system."""
    found = list(compare(read_figures()))
    errors = sorted(error(one.left) for one in found)
    assert errors[len(errors) // 2] <= 1.12
    assert sum(each <= 1.3 for each in errors) >= 0.89 * len(errors)
    alone = sorted(error(left_out(found, one)) for one in found)
    assert alone[len(alone) // 2] <= 1.14


def test_one_dense_figure_is_met_without_a_factor():
    figure = next(one for one in read_figures() if one.model == "Llama 3.1 8B, bf16")
    assert isinstance(figure, Figure)
    (one,) = compare([figure])
    assert one.ratio == pytest.approx(1.0, abs=0.05)
    assert one.gpus == 8
