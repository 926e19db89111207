"""The measurement itself: predictions from known costs, what it refuses, and a tiny op timer."""

import jax
import pytest

from jaxpipe.bench.efficiency import main
from jaxpipe.bench.ops import OpTimer
from jaxpipe.bench.steps import Rounds
from jaxpipe.bench.table import Row, lockstep_seconds, table
from jaxpipe.bench.workload import VARIANTS, WORKLOADS, OpTimes
from jaxpipe.model import Decoder
from jaxpipe.pipeline import StageFunctions

TIMES = OpTimes(
    F=1, B=1, W=1, BW=2, head=0.5, embed=0.25, embed_gradient=0.125, transfer=0.0625
)  # fmt: skip


def test_known_costs_give_the_seconds_computed_by_hand():
    """1F1B, P = 2, M = 2, a layer a stage; a tick is as long as its slowest cell.

    rank 0: F0    F1    .   B0     .    B1       F: 1 + embed, B: 2 + embed_gradient
    rank 1: .     F0    B0  F1     B1   .        F: 1 + head,  B: 2
    """
    schedule = VARIANTS["1f1b"].build(2, 2)
    ticks = 1.25 + 1.5 + 2 + 2.125 + 2 + 2.125
    assert lockstep_seconds("1f1b", schedule, TIMES, 2) == ticks + 5 * 0.0625


def test_the_unsplit_backward_is_the_measured_one():
    costs = TIMES.costs((3, 3), split=False)
    assert [b + w for b, w in zip(costs.B, costs.W)] == [6.125, 6]
    assert list(costs.F) == [3.25, 3.5]


def test_ranks_that_share_the_ends_pay_alike():
    """The ends and four exchanges of each microbatch on each of two ranks, with two stages each."""
    costs = TIMES.costs((2, 2, 2, 2), split=True, shared_by=2)
    assert set(costs.F) == {2 + ((0.5 + 0.25 + 0.125) / 2 + 4 * 0.0625) / 2}
    assert (set(costs.B), set(costs.W)) == ({2}, {2})


def test_efficiencies_are_ratios_within_a_round():
    first = {"jaxpipe single": 10.0, "jaxpipe 1f1b": 8.0, "ops": TIMES}
    second = {"jaxpipe single": 20.0, "jaxpipe 1f1b": 10.0, "torch single": 3.0}
    third = {"jaxpipe 1f1b": 1.0, "torch Schedule1F1B": 1.0}
    row = Row("1f1b", VARIANTS["1f1b"].build(2, 2), 2, Rounds([first, second, third]))
    assert row.measured() == [0.625, 1.0]
    assert row.predicted() == [5 / 11.3125]
    assert row.kept_promise() == [11.3125 / 8]
    assert row.torch() == []
    assert "| 1f1b | 2 | 0.812 (0.625-1.000) | 0.442 (0.442-0.442) |" in table([row])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_schedule_can_be_built(variant):
    chosen = VARIANTS[variant]
    layers = chosen.layers(8, 2)
    schedule = chosen.build(2, 8, chosen.costs(TIMES, 8, 2, split=True))
    assert len(layers) == schedule.stages
    assert lockstep_seconds(variant, schedule, TIMES, 8) > 8 * 8 * 3 / 2


def test_the_op_timer_gives_every_op_a_positive_time():
    workload = WORKLOADS["tiny"]
    decoder, key = Decoder(workload.model), jax.random.key(0)
    functions = StageFunctions(decoder.embed, decoder.layer, decoder.head, decoder.count)
    tokens = jax.numpy.zeros((workload.microbatch_size, workload.seq_len), int)
    layers = tuple(decoder.init_layer(key, i) for i in range(2))
    timer = OpTimer(
        functions, decoder.init_ends(key), layers, {"inputs": tokens, "targets": tokens}
    )
    seconds = timer.seconds()
    assert seconds.keys() == set(OpTimes.__struct_fields__) - {"transfer"}
    assert min(seconds.values()) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--schedules", "zbx"], "unknown schedule 'zbx'"),
        (["--schedules", "dualpipe", "--microbatches", "3"], "dualpipe needs an even pp"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--torch", "/nowhere/python"], "cannot be started"),
        (["--out", "/nowhere/results.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1
