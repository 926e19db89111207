"""`bench ops --table`: kernels of known sizes and speed, its time limit, and plans by its table."""

import json

import jax
import pytest
from commands import SMALL

from jaxpipe import bench
from jaxpipe.lab.bench import card, card_kernels
from jaxpipe.lab.bench.card_kernels import (
    AttentionKernel,
    CopyKernel,
    ProductKernel,
    grid,
    needed,
)
from jaxpipe.lab.bench.processes import BenchError
from jaxpipe.plan import main as plan
from jaxpipe.planning.cost.card import Rates, fitted
from jaxpipe.planning.cost.kernels import Attention, Product
from jaxpipe.planning.cost.operations import operations_of
from jaxpipe.runtime.devices import DEVICES

ROWS = 4096
SHEET = DEVICES["H200"]
RATES = Rates(
    limits={1: 0.7, 2: 0.8, 4: 0.6}, half=900.0, attention=(1.2, 1.4, 600.0, 50.0), launch=3e-6,
    bandwidth=0.85, sustained=0.9,
)  # fmt: skip


class Gpu:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


class Unknown(Gpu):
    device_kind, compute_capability, core_count = "NVIDIA RTX 3090", "8.6", 82

    def memory_stats(self):
        return {"bytes_limit": 22e9}


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


class ByLaws:
    """A kernel that takes what `RATES` say on an H200, and 2 s to compile."""

    def __init__(self, kernel, clock):
        self.kernel, self.clock, self.runs = kernel, clock, 0
        clock.now += 2

    def seconds(self):
        self.runs += 1
        self.clock.now += 1
        slower = 1 / RATES.sustained if self.runs > 20 else 1
        return (self.kernel.launches * RATES.launch + self._own()) * slower

    def _own(self):
        kernel = self.kernel
        copying = SHEET.bandwidth * RATES.bandwidth
        if isinstance(kernel, CopyKernel):
            return RATES.launch + kernel.measured(1.0, "x").bytes / copying
        if isinstance(kernel, AttentionKernel):
            flops = kernel.measured(1.0, "x").tflops * 1e12
            one = Attention(kernel.keys, kernel.width, flops, kernel.gradient)
            return flops / SHEET.flops / RATES.attended(one)
        product = kernel.measured(1.0, "x").product
        peak = {1: SHEET.fp8, 2: SHEET.flops, 4: SHEET.flops / 2}[product.itemsize]
        computed = product.flops / peak / RATES.product(product, SHEET.cores)
        return (computed**2 + (product.bytes / copying) ** 2) ** 0.5


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(card, "time", found)
    monkeypatch.setattr(card, "TimedKernel", lambda kernel: ByLaws(kernel, found))
    return found


def test_a_table_has_the_laws_by_which_its_kernels_run(clock, capsys):
    table = card.Survey(Gpu(), "by laws", minutes=100, repeats=5).table(ROWS)
    own = fitted(table)
    assert (own.device, own.sheet, table.sheet) == ("H200", SHEET, None)
    assert own.rates.limits == pytest.approx(RATES.limits, rel=1e-3)
    assert own.rates.half == pytest.approx(RATES.half, rel=1e-3)
    assert own.rates.attention == pytest.approx(RATES.attention, rel=1e-3)
    assert own.rates.launch == pytest.approx(RATES.launch, rel=0.01)
    assert own.rates.bandwidth == pytest.approx(RATES.bandwidth)
    assert own.rates.sustained == pytest.approx(RATES.sustained)
    every = [*needed(ROWS, (2, 1, 4)), *grid(ROWS, (2, 1, 4))]
    assert len(every) == len(set(every)) == len(capsys.readouterr().err.splitlines()) - 1


def test_what_the_time_does_not_allow_is_named(clock):
    survey = card.Survey(Gpu(), "by laws", minutes=2, repeats=5)
    table = survey.table(ROWS)
    assert clock.now <= 120 + 1
    every = [*needed(ROWS, (2, 1, 4)), *grid(ROWS, (2, 1, 4))]
    measured = len(table.products) + len(table.attention) + len(table.copies)
    assert survey.left_out == {"no time": [str(kernel) for kernel in every[measured:]]}
    assert 1 in {one.itemsize for one in table.products}  # fp8 comes before other sizes
    text = card.summary(table, survey.left_out, "h200.json")
    assert f"left out (no time), {len(every) - measured}: " in text
    assert text.endswith("wrote h200.json: python -m jaxpipe.plan CONFIG --machine h200.json")


def test_a_card_without_a_data_sheet_has_the_fastest_that_was_measured(clock):
    table = card.Survey(Unknown(), "by laws", minutes=1, repeats=5).table(ROWS)
    assert (table.device, table.sheet.cores, table.sheet.fp8) == ("NVIDIA RTX 3090", 82, 0)
    assert table.sheet.flops == 1e12 * max(one.tflops for one in table.products)
    assert table.sheet.memory == int(22e9 / 0.92)
    assert "its peaks are the fastest measured" in card.summary(table, {}, "x.json")


def test_kernels_that_a_card_does_not_run_are_left_out_or_end_the_table(clock, monkeypatch):
    def no_gradients(kernel):
        if getattr(kernel, "gradient", False):
            raise NotImplementedError("no such kernel\nhere")
        return ByLaws(kernel, clock)

    monkeypatch.setattr(card, "TimedKernel", no_gradients)
    with pytest.raises(BenchError, match="entries in 'attention' .*\nleft out .no such kernel., 9"):
        card.Survey(Gpu(), "by laws", minutes=100, repeats=5).table(ROWS)


@pytest.mark.parametrize("kernel", [
    ProductKernel(4, 1, 32, 16, 64), ProductKernel(2, 8, 4, 16, 16), ProductKernel(1, 1, 32, 8, 64),
], ids=str)  # fmt: skip
def test_a_product_is_what_its_entry_says(kernel):
    """And two of them are two, which a barrier keeps apart."""

    def twice(state, fixed):
        return kernel.apply(kernel.apply(state, fixed), fixed)

    operations = operations_of(jax.make_jaxpr(twice)(*jax.eval_shape(kernel.start)).jaxpr)
    product = kernel.measured(1.0, "x").product
    assert operations.products == {product: 2}
    assert isinstance(product, Product)
    assert kernel.measured(2.0, "x").seconds == pytest.approx(2.0)


def test_a_copy_moves_what_its_entry_says():
    kernel = CopyKernel(1 << 20)
    found = operations_of(jax.make_jaxpr(kernel.apply)(*jax.eval_shape(kernel.start)).jaxpr)
    assert (found.moved, found.launches) == (kernel.measured(1.0, "x").bytes, 1)
    assert CopyKernel(1, update=True).measured(1.0, "x").bytes == 4 * 7


def test_a_timed_kernel_runs_as_often_as_it_counts(monkeypatch):
    calls = []

    def counted(x, y):
        jax.debug.callback(lambda: calls.append(1))
        return x

    monkeypatch.setattr(card_kernels, "_reads", counted)
    kernel = ProductKernel(4, 1, 8, 8, 8, applied=3)
    timed = card_kernels.TimedKernel(kernel)
    jax.effects_barrier()
    before = len(calls)
    assert timed.seconds() > 0
    jax.effects_barrier()
    assert len(calls) - before == before == 2 * 3


@pytest.mark.parametrize(("words", "message"), [
    (["--table"], "give --out FILE.json"),
    (["--table", "configs/x.toml", "--out", "x.json"], "leave out configs/x.toml"),
    (["--table", "--rows", "8", "--out", "x.json"], "--rows 8 must be at least 32"),
    ([], "give a configuration, or --table"),
])  # fmt: skip
def test_words_that_do_not_go_together(words, message, capsys):
    assert bench.main(["ops", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.extended
def test_a_plan_by_the_table_of_this_machine(tmp_path, monkeypatch, capsys):
    """Kernels run here, but take the time of laws: that of tiny ones is mostly chance."""

    def timed(kernel):
        assert card_kernels.TimedKernel(kernel).seconds() > 0
        return ByLaws(kernel, Clock())

    monkeypatch.setattr(card, "TimedKernel", timed)
    out = tmp_path / "own.json"
    words = ["ops", "--table", "--rows", "32", "--minutes", "0", "--repeats", "1", "--out"]
    assert bench.main([*words, str(out)]) == 0
    assert "left out (no time)" in capsys.readouterr().out
    sources = {one["source"] for one in json.loads(out.read_text())["products"]}
    assert all(f"{' '.join(words)} {out}" in source and "jax" in source for source in sources)
    assert plan([str(SMALL), "--machine", str(out), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert plan([str(SMALL), "--json"]) == 0
    h100 = json.loads(capsys.readouterr().out)
    pairs = list(zip(own["schedules"], h100["schedules"]))
    assert pairs
    assert all(mine["step_seconds"] != usual["step_seconds"] > 0 for mine, usual in pairs)
