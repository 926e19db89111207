"""Families of schedules: what they say is what their builders do, within limits of memory."""

from inspect import signature

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import QUICK, SEARCHED, near
from oracles.peaks import peak_held
from orders import nearest_sizes

from jaxpipe.core.schedule import (
    Costs,
    Lockstep,
    Op,
    ScheduleError,
    lower,
    read_schedule,
    simulate,
    validate,
    write_schedule,
)
from jaxpipe.schedules import BUILDERS, FAMILIES, VariantSizes, build


@pytest.mark.slow(unless=["zb_auto", "zbv"])
@pytest.mark.parametrize("name", SEARCHED)
@given(
    pp=st.integers(1, 12),
    microbatches=st.integers(1, 24),
    times=st.tuples(*[st.floats(0.2, 3.0)] * 3),
)
@settings(max_examples=15, deadline=None)
def test_every_search_ends_within_its_memory(name, pp, microbatches, times):
    schedule = near(name, pp, microbatches, costs=Costs(*times, transfer=0.05))
    validate(schedule)
    declared = peak_held(name, pp, microbatches, schedule.stages // pp)
    held = simulate(schedule).peak_until_w
    assert all(here <= most for here, most in zip(held, declared))


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "message"),
    [
        ("4p4q", 2, 2, "unknown schedule '4p4q': Choose one of gpipe, 1f1b"),
        ("Interleaved1F1B", 2, 2, "did you mean interleaved_1f1b"),
        ("dualpipe", 3, 8, "even pp .* got pp=3, microbatches=8; with pp=4 use 8"),
        ("dualpipe", 4, 7, "with pp=4 use 8"),
        ("dualpipev", 4, 7, "at least 2 pp microbatches: .* use 8 or more"),
        ("interleaved_1f1b", 2, 5, "microbatches=5 must be a multiple of .* 2 .*: use 4 or 6"),
        ("1f1b", 0, 2, "pp=0"),
        ("gpipe", 2, 0, "microbatches=0"),
    ],
)
def test_build_rejects(name, pp, microbatches, message):
    with pytest.raises(ScheduleError, match=message):
        build(name, pp=pp, microbatches=microbatches)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_takes_costs_and_a_memory_limit(name):
    """A limit at the schedule's own peak is accepted; below it a search finds another schedule.

    Families without a search refuse it, and name the least limit.
    """
    costs = Costs(1.0, 1.2, 0.8, transfer=0.1)
    sizes = {"pp": 4, "microbatches": 8, "costs": costs}
    if name in SEARCHED:
        sizes["effort"] = QUICK
    peak = max(simulate(build(name, **sizes)).peak_until_w)
    schedule = build(name, **sizes, memory_limit=peak, objective="makespan")
    assert max(simulate(schedule).peak_until_w) <= peak
    if name in SEARCHED:
        for less in (peak - 1, 2):
            assert max(simulate(build(name, **sizes, memory_limit=less)).peak_until_w) <= less
    else:
        with pytest.raises(ScheduleError, match=f"the least that works for it is {peak}"):
            build(name, **sizes, memory_limit=peak - 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_says_is_what_its_builder_does(name, tmp_path):
    """Its nearest sizes are built, others are refused; placement, stages and slices match."""
    family, options = FAMILIES[name], {}
    assert family.name == name
    assert "\n" not in family.summary
    assert len(family.summary) <= 80
    if family.placement == "file":
        write_schedule(build("1f1b", pp=4, microbatches=8), tmp_path / "order.csv")
        options = {"path": tmp_path / "order.csv"}
    if family.is_searched:
        options = {"effort": QUICK}
    pp, microbatches = nearest_sizes(name, 4, 8)
    schedule = build(name, pp=pp, microbatches=microbatches, **options)
    assert schedule.stages == pp * family.stages
    rank_of = schedule.placement.rank_of
    turns = len(rank_of) > pp and rank_of[pp - 1] == rank_of[pp]
    assert turns == (family.placement == "v")
    mirrored = schedule.placement.mirrored_from is not None
    assert mirrored == (family.placement == "both ways")
    if family.placement != "file":
        assert schedule.placement == family.place_stages(pp, microbatches=microbatches)
        assert family.splits == any(action.op is Op.B for _, action in schedule.actions())
    if family.placement == "file":  # its slices are those of the file: test_custom.py
        assert family.has_option("slices")
    elif family.has_option("slices"):
        sliced = build(name, pp=pp, microbatches=microbatches, slices=2)
        assert (sliced.slices, sliced.microbatches) == (2, 2 * microbatches)
    else:
        with pytest.raises(ScheduleError, match="has no slices"):
            build(name, pp=pp, microbatches=microbatches, slices=2, **options)


@pytest.mark.parametrize("name", BUILDERS)
def test_variants_to_plan_can_be_built(name):
    family = FAMILIES[name]
    variants = list(family.variants(name, VariantSizes(pp=4, layers=12)))
    assert variants
    assert len({variant.label for variant in variants}) == len(variants)
    for variant in variants:
        assert variant.family == name
        options = {"effort": QUICK} if family.is_searched else {}
        chosen = {"virtual_stages": variant.virtual_stages, "memory_limit": variant.memory_limit}
        schedule = build(name, pp=4, microbatches=8, **chosen, **options)
        lower(schedule, Lockstep(in_flight=variant.in_flight))


def test_packed_1f1b_is_as_tight_as_it_can_be():
    """With one fewer in flight the scan waits; slices and a shared vocabulary need more."""
    for slices, shared in ((1, False), (1, True), (2, False), (2, True)):
        schedule = build("1f1b", pp=4, microbatches=16, slices=slices)
        packed = VariantSizes(4, 8, slices, shared).packed_in_flight
        ticks = [
            lower(schedule, Lockstep(in_flight=n, vocab_parallel=shared)).ticks
            for n in (packed - 1, packed, packed + 1)
        ]
        assert ticks[0] > ticks[1] == ticks[2]


def test_groups_have_at_least_one_microbatch():
    with pytest.raises(ScheduleError, match="breadth=0 must be at least 1"):
        build("interleaved_1f1b", pp=4, microbatches=8, breadth=0)


@pytest.mark.parametrize("suffix", [".csv", ".json"])
@pytest.mark.parametrize("name", SEARCHED)
def test_a_searched_schedule_is_read_from_its_file(tmp_path, name, suffix):
    schedule = near(name, 4, 8)
    write_schedule(schedule, tmp_path / f"{name}{suffix}")
    again = read_schedule(tmp_path / f"{name}{suffix}")
    assert (again.ranks, again.placement) == (schedule.ranks, schedule.placement)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_record_has_the_builders_options(name):
    family = FAMILIES[name]
    _, _, *parameters = signature(family.builder).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert (defaults.pop("target", None) is not None) == family.is_searched
    assert defaults == dict(family.options)
