"""Builders against orders recorded from other code, published figures and closed forms."""

import json
from pathlib import Path

import pytest
from orders import build

from jaxpipe.core.schedule import Costs, simulate

DATA = Path(__file__).parents[2] / "data"
RECORDED = json.loads((DATA / "orders.json").read_text())["cases"]
TIMES = json.loads((DATA / "dualpipe_times.json").read_text())["cases"]


def name_of(case):
    return f"{case['name']}-{case['pp']}-{case.get('virtual_stages')}-{case['microbatches']}"


@pytest.mark.parametrize("case", RECORDED, ids=name_of)
def test_orders_equal_pytorch_and_deepseek(case):
    stages = case["virtual_stages"]
    options = {"virtual_stages": stages} if stages else {}
    schedule = build(case["name"], pp=case["pp"], microbatches=case["microbatches"], **options)
    assert [" ".join(order) for order in schedule.notation()] == case["orders"]


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{name_of(case)}-{case['cost']}")
def test_dualpipe_times(case):
    cost = case["cost"]  # its B is the whole backward
    costs = Costs(F=cost["F"], B=cost["B"] - cost["W"], W=cost["W"], pair=cost["FB"])
    schedule = build(case["name"], pp=case["pp"], microbatches=case["microbatches"])
    report = simulate(schedule, costs)
    assert report.makespan == pytest.approx(case["makespan"])
    assert report.max_span == pytest.approx(case["span"])


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_dualpipe_bubble_formula(pp):
    """(P/2-1)(pair + BW - 3W), exact for B = F, W <= F and a pair of F + BW (DeepSeek's README)."""
    for f, w in [(2.0, 1.0), (3.0, 3.0), (1.5, 0.5)]:
        schedule = build("dualpipe", pp=pp, microbatches=2 * pp + 4)
        report = simulate(schedule, Costs(F=f, B=f, W=w))
        work = schedule.microbatches * (2 * f + w)
        assert report.makespan - work == pytest.approx((pp / 2 - 1) * (f + 2 * (f + w) - 3 * w))
        assert report.peak_until_w == (pp + 1,) * pp


# Qi et al. 2024, Table 5: model, P, M, T_F, T_B, T_W, T_comm in ms, bubbles of 1F1B, H1 and H2.
TABLE_5 = [
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516),
    ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266),
    ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    ("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490),
    ("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row[0]}-{row[2]}")
def test_zero_bubble_paper_table_5(row):
    _, pp, microbatches, f, b, w, transfer, *bubbles = row
    for name, bubble in zip(("1f1b", "zb_h1", "zb_h2"), bubbles):
        schedule = build(name, pp=pp, microbatches=microbatches)
        report = simulate(schedule, Costs(f, b, w, transfer))
        assert round(report.bubble_span, 4) == bubble, name


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [2, 3, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.9), (2.0, 1.5, 1.0)])
def test_zero_bubble_paper_table_2(pp, rounds, times):
    """Span bubbles: 1F1B (P-1)(F+B+W), H1 (P-1)(F+B-W), H2 (P-1)(F+B-2W)."""
    f, b, w = times
    microbatches = rounds * pp
    ideal = microbatches * (f + b + w)
    for name, gap in (("1f1b", f + b + w), ("zb_h1", f + b - w), ("zb_h2", f + b - 2 * w)):
        report = simulate(build(name, pp=pp, microbatches=microbatches), Costs(f, b, w))
        assert report.max_span - ideal == pytest.approx((pp - 1) * gap), name


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_bubbles_of_several_stages_a_rank(pp, rounds, v):
    """In times of a chunk: (P-1)(F+B+W) for bfs and interleaved, (P-1)(F+B-W) for its zb form."""
    microbatches = rounds * pp
    for name, gap in (("bfs", 3), ("interleaved_1f1b", 3), ("interleaved_zb", 1)):
        schedule = build(name, pp=pp, microbatches=microbatches, virtual_stages=v)
        report = simulate(schedule)
        assert report.makespan - 3 * microbatches * v == pytest.approx((pp - 1) * gap), name


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_held_chunks(pp, rounds, v):
    """Per rank r, counted in chunks until B and until W; see the table in `loop.py`."""
    m, ranks = rounds * pp, range(pp)

    def peaks(name, **sizes):
        report = simulate(build(name, pp=pp, microbatches=m, **sizes))
        return report.peak_until_b, report.peak_until_w

    k = m // max(1, m // pp)
    wide = {"virtual_stages": v}
    held = tuple(min(m * v, (v - 1) * k + 2 * (pp - 1 - r) + 1) for r in ranks)
    if v > 1:
        assert peaks("interleaved_1f1b", **wide) == (held, held)
    until_b = tuple(min(m * v, (v - 1) * k + pp - r) for r in ranks)
    until_w = (min(m * v, (v - 1) * k + pp),) * pp
    assert peaks("interleaved_zb", **wide) == (until_b, until_w)
    assert peaks("bfs", **wide) == ((m * v,) * pp,) * 2
    assert peaks("zb_h1") == (tuple(pp - r for r in ranks), (pp,) * pp)
    if rounds >= 2:
        assert peaks("zb_h2") == (tuple(2 * (pp - r) - 1 for r in ranks), (2 * pp - 1,) * pp)
        assert peaks("dualpipev")[1] == (2 * pp + 1,) * pp
