"""Closed-form bubbles and memory against printed tables and the simulation of every schedule."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.bubbles import BUBBLES, OpTimes, bubble, held_activations

from jaxpipe.core.schedule import Costs, Op
from jaxpipe.core.schedule.simulate import asynchronous_times, simulate
from jaxpipe.schedules import BUILDERS, FAMILIES, build

RANKS = st.sampled_from([2, 3, 4, 6])
TIME = st.integers(1, 6)


def idle(name, pp, microbatches, times, *, span=False, **sizes):
    """Return the idle time of the rank that idles most, in the whole step or in its own span."""
    costs = Costs(times.F, times.B, times.W, pair=times.overlapped)
    schedule = build(name, pp=pp, microbatches=microbatches, **sizes)
    lines = asynchronous_times(schedule, costs)
    begin = min(line[0][0] for line in lines)
    end = max(line[-1][1] for line in lines)
    return max(
        (line[-1][1] - line[0][0] if span else end - begin) - sum(b - a for a, b in line)
        for line in lines
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "bfs"])
@given(pp=RANKS, rounds=st.integers(1, 3), f=TIME, b=TIME, w=TIME)
@settings(max_examples=25, deadline=None)
def test_unsplit_backward(name, pp, rounds, f, b, w):
    times = OpTimes(f, b, w)
    assert idle(name, pp, rounds * pp, times) == bubble(name, pp, times)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
def test_larger_groups_keep_the_bubble_and_hold_more(name):
    """Megatron's groups larger than P keep (v - 1) more live for each additional microbatch."""
    pp, times = 4, OpTimes(3, 2, 1)
    for breadth, microbatches in ((4, 16), (5, 15), (6, 16), (8, 16), (16, 16)):
        sizes = {"virtual_stages": 2, "breadth": breadth}
        assert idle(name, pp, microbatches, times, **sizes) == bubble(name, pp, times)
        peaks = simulate(build(name, pp=pp, microbatches=microbatches, **sizes)).peak_until_w
        first = 2 * (pp - 1) + 1 if name == "interleaved_1f1b" else pp
        assert peaks[0] == breadth + first


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "bfs", "interleaved_zb"])
def test_several_stages_a_rank_divide_the_bubble(name, v):
    """Times are those of a stage, so the bubble is independent of the stages per rank."""
    for pp in (2, 4):
        times = OpTimes(3, 2, 1)
        assert idle(name, pp, 2 * pp, times, virtual_stages=v) == bubble(name, pp, times)


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zb"])
@given(pp=RANKS, rounds=st.integers(1, 3), f=TIME, b=TIME, w=TIME)
@settings(max_examples=25, deadline=None)
def test_zb_h1(name, pp, rounds, f, b, w):
    assume(w <= f and w <= b)
    times = OpTimes(f, b, w)
    assert idle(name, pp, rounds * pp, times) == bubble(name, pp, times)


@given(pp=RANKS, beyond=st.integers(0, 9), f=TIME, b=TIME, w=TIME)
@settings(max_examples=40, deadline=None)
def test_zb_h2(pp, beyond, f, b, w):
    assume(w <= f and w <= b)
    times = OpTimes(f, b, w)
    assert idle("zb_h2", pp, 2 * pp + beyond, times, span=True) == bubble("zb_h2", pp, times)


@pytest.mark.parametrize(("name", "ranks"), [("dualpipe", [2, 4, 6]), ("dualpipev", [1, 2, 3, 4])])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_dualpipe(name, ranks, data):
    pp = data.draw(st.sampled_from(ranks))
    f, w = data.draw(TIME), data.draw(TIME)
    if data.draw(st.booleans()):
        assume(w <= f)
        times = OpTimes(f, f, w)
    else:
        times = OpTimes(f, f, f, overlapped=data.draw(st.integers(2 * f, 3 * f)))
    microbatches = 2 * pp + 2 * data.draw(st.integers(0, 3))
    assert idle(name, pp, microbatches, times) == bubble(name, pp, times)


@pytest.mark.parametrize("pp", [4, 8, 16])
@pytest.mark.parametrize("t", [(1.0, 1.0, 1.0), (1.0, 1.4, 0.9), (18.522, 18.086, 9.337)])
def test_the_two_meanings_of_b_agree(pp, t):
    """DeepSeek's table calls the whole backward B, the zero-bubble paper the input gradient."""
    f, b, w = t
    whole = b + w
    times = OpTimes.of_backward(F=f, backward=whole, W=w)
    for name, paper, readme in [
        ("1f1b", (pp - 1) * (f + b + w), (pp - 1) * (f + whole)),
        ("zb_h1", (pp - 1) * (f + b - w), (pp - 1) * (f + whole - 2 * w)),
    ]:
        assert bubble(name, pp, times) == pytest.approx(paper)
        assert bubble(name, pp, times) == pytest.approx(readme)
    pair = f + whole
    overlapped = OpTimes.of_backward(F=f, backward=whole, W=w, overlapped=pair)
    readme = (pp / 2 - 1) * (pair + whole - 3 * w)
    assert bubble("dualpipe", pp, overlapped) == pytest.approx(readme)
    assert bubble("dualpipev", pp // 2, overlapped) == pytest.approx(readme)


def test_printed_numbers():
    """Equal times: a third of 1F1B's bubble for H1, none for H2; unequal ones, 8 ranks."""
    unit, uneven = OpTimes(1, 1, 1), OpTimes(1, 1.4, 0.9)
    three = ("1f1b", "zb_h1", "zb_h2")
    assert [bubble(name, 8, unit) for name in three] == [21, 7, 0]
    assert [bubble(name, 8, uneven) for name in three] == pytest.approx([23.1, 10.5, 4.2])


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("m_w", [0.0, 0.5, 1.0])
def test_held_activations(name, pp, m_w):
    """Peaks of a rank's order of F, B and W, with M_B from F to B and M_W from B to W."""
    change = {Op.F: 1.0, Op.B: m_w - 1.0, Op.W: -m_w, Op.BW: -1.0}
    peaks = []
    for order in build(name, pp=pp, microbatches=2 * pp).ranks:
        held = peak = 0.0
        for cell in order:
            for action in cell.actions:
                held += change[action.op]
                peak = max(peak, held)
        peaks.append(peak)
    assert held_activations(name, pp, until_b=1.0, until_w=m_w) == tuple(peaks)


def test_printed_memory():
    def halves(name):
        return held_activations(name, 4, until_b=1.0, until_w=0.5)

    assert halves("zb_h1") == (4, 3.5, 3, 2.5)
    assert halves("zb_h2") == (7, 6, 5, 4)
    assert max(held_activations("zb_h2", 8, until_b=34.0, until_w=32.0)) == 15 * 34


def test_what_has_no_closed_form():
    searched = {name for name in BUILDERS if FAMILIES[name].is_searched}
    assert BUILDERS.keys() - BUBBLES.keys() == searched | {"1f1b_v"}
    with pytest.raises(ValueError, match="no closed form for the bubble of 'zb_auto'"):
        bubble("zb_auto", 4, OpTimes(1, 1, 1))
    with pytest.raises(ValueError, match="no closed form for the memory of 'gpipe'"):
        held_activations("gpipe", 4, until_b=1, until_w=1)
    with pytest.raises(ValueError, match="dualpipe needs an even pp, got pp=3"):
        bubble("dualpipe", 3, OpTimes(1, 1, 1))
