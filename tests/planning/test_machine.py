"""Where mesh axes lie on hosts, the seconds of collectives, and the laws through measured rates."""

import json
from importlib.resources import files

import jax
import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from jaxpipe import config as configs
from jaxpipe.config import ConfigError, ParallelConfig
from jaxpipe.planning import Hardware, op_seconds
from jaxpipe.planning.cost import card
from jaxpipe.planning.cost.card_table import MeasuredProduct, read_table
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


def test_laws_are_close_to_every_entry():
    found = card.deviations(read_table())
    assert found["products"] == pytest.approx([1] * 19, rel=0.12)
    assert found["attention"] == pytest.approx([1] * 18, rel=0.05)
    assert found["copies"] == pytest.approx([1, 1])


def test_tables_without_what_a_plan_needs_are_refused_by_name(tmp_path):
    path = tmp_path / "mine.json"
    product, attention = TABLE["products"][0], TABLE["attention"][0]
    named = dict(product)
    del named["rows"]
    zero = attention | {"tflops": 0}
    alike = [one for one in TABLE["attention"] if one["width"] == 128]
    for change, message in (
        ({"clock": 1.0}, "unknown field `clock`"),
        (
            {"products": [product | {"batch": 3}]},
            r"unknown field `batch` - at `\$.products",
        ),
        ({"products": [named]}, r"missing required field `rows` - at `\$.products"),
        ({"products": [product | {"itemsize": 8}]}, r"enum value 8 - at `\$.products"),
        ({"products": [product]}, "mine.json: too few different entries in 'products'"),
        ({"attention": [zero]}, r"Expected `float` > 0.0 - at `\$.attention\[0\].tflops`"),
        ({"attention": alike}, "too few different entries in 'attention' .*: it has 12"),
        ({"copies": []}, "too few different entries in 'copies'"),
        ({"sustained": None}, r"got `null` - at `\$.sustained`"),
        ({"device": "RTX 3090"}, "'RTX 3090' is none of .* has no `sheet`"),
        ({"device": "A100"}, "products of 8-bit floats .itemsize 1., which A100 does not"),
    ):
        read_table.cache_clear()
        card.card_of.cache_clear()
        path.write_text(json.dumps(TABLE | change))
        with pytest.raises(ConfigError, match=message):
            _ = machine(str(path)).sheet
    with pytest.raises(ConfigError, match="none.json is no table of a card"):
        machine(str(tmp_path / "none.json"))


def test_products_that_wait_for_memory_say_nothing_of_the_law():
    usual, table = card.fitted(read_table()), read_table()
    small = MeasuredProduct(2, 1, 16, 4096, 4096, 45.0, "mostly the bytes of its matrix")
    more = replace(table, products=(*table.products, small))
    assert card.fitted(more).rates == usual.rates


def test_few_rows_fill_a_tile_of_a_gpu_and_not_of_a_cpu():
    rates, few, many = (
        card.card_of("H100").rates,
        *(Product(2, 1, rows, 4096, 4096, bytes=0) for rows in (1, 128)),
    )
    assert rates.product(few, 132) == pytest.approx(rates.product(many, 132) / 128)
    assert rates.product(few, 1) == rates.product(many, 1)


def test_a_machine_with_a_table_takes_its_rates(tmp_path):
    """Also in a machine's file, from whose folder its path starts."""
    faster = [one | {"tflops": 2 * one["tflops"]} for one in TABLE["attention"]]
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(TABLE | {"attention": faster, "device": "H200"}))
    toml = tmp_path / "mine.toml"
    toml.write_text('table = "twice.json"\nper_host = 4\n')
    one = Operations(attentions={Attention(4096, 128, 1e12, False): 1})
    usual = machine("dgx-h200")
    for own in (machine(str(path)), machine(str(toml))):
        assert own.seconds(one) == pytest.approx(usual.seconds(one) / 2)
        assert (own.device, own.usual, own.sheet) == ("H200", usual, usual.sheet)
    assert machine(str(toml)).per_host == 4
    toml.write_text('table = "twice.json"\ndevice = "H100"\n')
    with pytest.raises(ConfigError, match="device='H100' with the table of 'H200'"):
        machine(str(toml))


def test_entries_say_where_they_were_measured():
    assert all(
        entry["source"] for kind in ("products", "attention", "copies") for entry in TABLE[kind]
    )


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
    assert errors[len(errors) // 2] <= 1.08
    assert sum(each <= 1.3 for each in errors) >= 0.94 * len(errors)
    alone = sorted(error(left_out(found, one)) for one in found)
    assert alone[len(alone) // 2] <= 1.09


def test_one_dense_figure_is_met_without_a_factor():
    figure = next(one for one in read_figures() if one.model == "Llama 3.1 8B, bf16")
    assert isinstance(figure, Figure)
    (one,) = compare([figure])
    assert one.ratio == pytest.approx(1.0, abs=0.05)
    assert one.gpus == 8
