"""Layer splits against the published examples."""

import pytest

from jaxpipe.core.schedule import ScheduleError, assign_layers


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (32, 4, (8, 8, 8, 8)),
        (80, 4, (20, 20, 20, 20)),
        (32, 3, (11, 11, 10)),
        (10, 3, (4, 3, 3)),
        (7, 2, (4, 3)),
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_even(layers, stages, counts):
    assert assign_layers(layers, stages) == counts


@pytest.mark.parametrize(
    ("layers", "stages", "weights", "counts"),
    [
        (36, 2, (1, 1), (18, 18)),
        (36, 4, (1, 1), (9, 10, 9, 8)),
        (80, 4, (1, 1), (20, 21, 20, 19)),
        (80, 8, (1, 1), (10, 11, 10, 10, 10, 10, 10, 9)),
        (32, 4, (1, 1), (8, 9, 8, 7)),
        (36, 4, (1, 3), (9, 10, 10, 7)),
    ],
)
def test_weighted(layers, stages, weights, counts):
    assert assign_layers(layers, stages, "weighted", weights=weights) == counts


def test_pinned_ends():
    assert assign_layers(8, 4, pinned=(1, 1)) == (1, 3, 3, 1)
    assert assign_layers(8, 4, pinned=(0, 2)) == (2, 2, 2, 2)
    assert assign_layers(7, 2, pinned=(4, 3)) == (4, 3)


@pytest.mark.parametrize("layers", [4, 8, 12, 17, 32])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["even", "weighted"])
def test_covers_all_layers(layers, stages, policy):
    counts = assign_layers(layers, stages, policy)
    assert sum(counts) == layers
    assert min(counts) >= 1


def test_a_heavy_head_leaves_its_stage_one_layer():
    assert assign_layers(4, 4, "weighted", weights=(1, 4)) == (1, 1, 1, 1)
    assert assign_layers(61, 32, "weighted") == (1, 1, *[2] * 29, 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((3, 4), {}, "3 layers cannot fill 4 stages"),
        ((4, 0), {}, "0 stages"),
        ((8, 4, [2, 2, 4]), {}, "3 entries with sum 8: it needs 4 entries"),
        ((8, 4, [2, 2, 2, 1]), {}, "sum 7: it needs 4 entries"),
        ((8, 4, [2, 0, 4, 2]), {}, "leaves stage 1 without"),
        ((8, 4, [2, 2, 2, 2]), {"pinned": (3, 0)}, "first=3 and last=0 must be 0"),
        ((8, 4, "odd"), {}, "unknown layer split 'odd'"),
        ((8, 4), {"pinned": (7, 0)}, "leaves 1 of 8 layers for 3 stages"),
        ((8, 2), {"pinned": (3, 3)}, "leaves 2 of 8 layers for 0 stages"),
    ],
)
def test_rejects(args, kwargs, message):
    with pytest.raises(ScheduleError, match=message):
        assign_layers(*args, **kwargs)
