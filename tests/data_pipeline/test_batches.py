"""Order is a function of (seed, position), independent of how rows are sharded."""

import itertools
import subprocess
import sys
import threading

import grain
import numpy as np
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.batches import Batch, DataSplit, heldout_order, training_order
from jaxpipe.data.samples import make_sample
from jaxpipe.model.loss import IGNORE

L, N = 5, 23
SHAPE = {"microbatches": 3, "batch_size": 4}  # 12 samples a step, so a step spans two epochs


def split(order: grain.MapDataset[int]) -> DataSplit:
    """Return N samples; sample i starts with token i * L."""
    samples = [make_sample(np.arange(i * L, (i + 1) * L + 1)) for i in range(N)]
    return DataSplit("training", "", samples, order)


def numbers(batch: Batch) -> np.ndarray:
    """Return the sample number of each row: `[M, B]`."""
    return batch["inputs"][..., 0] // L


def assert_equal(one: Batch, two: Batch) -> None:
    assert one.keys() == two.keys() == {"inputs", "targets"}
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_targets_are_the_next_tokens() -> None:
    batch = split(training_order([N], [1], 7)).batch(0, **SHAPE)
    for array in batch.values():
        assert (array.shape, array.dtype) == ((3, 4, L), np.int32)
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_sample_m_b_is_number_position_plus_m_times_B_plus_b() -> None:
    order = training_order([N], [1], 7)
    expected = [order[50 + i] for i in range(12)]
    np.testing.assert_array_equal(numbers(split(order).batch(50, **SHAPE)).ravel(), expected)


def test_rows_of_all_ranks_join_to_the_batch() -> None:
    data = split(training_order([N], [1], 7))
    for dp in (1, 2, 4):
        width = 4 // dp
        parts = [data.batch(9, rows=slice(r * width, (r + 1) * width), **SHAPE) for r in range(dp)]
        joined = {name: np.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}
        assert_equal(joined, data.batch(9, **SHAPE))


def test_the_microbatches_of_a_step_do_not_change_its_samples() -> None:
    data = split(training_order([N], [1], 7))
    shapes = [(1, 12), (2, 6), (12, 1)]
    taken = [
        numbers(data.batch(9, microbatches=m, batch_size=b)).ravel().tolist() for m, b in shapes
    ]
    assert taken[0] == taken[1] == taken[2]


def test_every_epoch_has_each_sample_once_in_another_order() -> None:
    order = training_order([N], [1], 7)
    epochs = [[order[epoch * N + i] for i in range(N)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert all(a != b for a, b in itertools.combinations(epochs, 2))


def test_order_depends_on_the_seed_alone() -> None:
    one, same, other = (training_order([N], [1], seed) for seed in (7, 7, 8))
    assert [one[i] for i in range(99)] == [same[i] for i in range(99)]
    assert [one[i] for i in range(N)] != [other[i] for i in range(N)]
    # The second epoch of a seed is not the first epoch of the next seed.
    assert [one[N + i] for i in range(N)] != [other[i] for i in range(N)]


def test_order_is_the_one_of_earlier_versions() -> None:
    # A checkpoint holds only a position, so its order must not change with jaxpipe or grain.
    order = training_order([10], [1], 3)
    assert [order[i] for i in range(10)] == [4, 6, 9, 7, 5, 3, 1, 8, 2, 0]
    assert [order[i] for i in range(10, 20)] == [8, 1, 3, 7, 9, 0, 5, 4, 2, 6]


def test_unshuffled_order() -> None:
    order = training_order([3], [1], None)
    assert [order[i] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


SIZES, WEIGHTS = [23, 5, 40], [0.5, 0.2, 0.3]


def which(order: grain.MapDataset[int], positions: range) -> np.ndarray:
    """Return the source of each position."""
    return np.searchsorted(np.cumsum(SIZES), [order[i] for i in positions], side="right")


def test_sources_are_mixed_in_their_proportion_all_along() -> None:
    order = training_order(SIZES, WEIGHTS, 7)
    for begin, end in ((0, 200), (0, 37), (10**9, 10**9 + 50)):
        counts = np.bincount(which(order, range(begin, end)), minlength=3)
        np.testing.assert_allclose(counts, np.array(WEIGHTS) * (end - begin), atol=2)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [7, None])
def test_every_source_of_a_mixture_has_epochs_of_its_own(seed: int | None) -> None:
    order = training_order(SIZES, WEIGHTS, seed)
    taken = np.array([order[i] for i in range(400)])
    for source, (begin, size) in enumerate(zip([0, 23, 28], SIZES)):
        own = taken[which(order, range(400)) == source]
        assert len(own) > 2 * size
        for epoch in range(2):
            passed = own[epoch * size : (epoch + 1) * size]
            np.testing.assert_array_equal(sorted(passed), np.arange(begin, begin + size))
            assert (seed is None) == (passed[0] == begin and (np.diff(passed) == 1).all())


def test_the_first_source_is_in_the_order_that_it_has_alone() -> None:
    mixed, alone = training_order(SIZES, WEIGHTS, 7), training_order(SIZES[:1], [1], 7)
    own = [mixed[i] for i in range(100) if mixed[i] < SIZES[0]]
    assert own == [alone[i] for i in range(len(own))]


def test_heldout_samples_of_a_mixture_are_taken_once() -> None:
    order = heldout_order(SIZES, WEIGHTS)
    taken = [order[i] for i in range(len(order))]
    assert len(set(taken)) == len(taken) == 25  # then the second, of 5 samples and 0.2, has ended
    counts = np.bincount(which(order, range(25)), minlength=3)
    np.testing.assert_allclose(counts, np.array(WEIGHTS) * 25, atol=1)
    samples = [make_sample(np.arange(i, i + L + 1)) for i in range(sum(SIZES))]
    heldout = DataSplit("held-out", "", samples, order)
    assert len(heldout) == 25
    (only,) = heldout.batches(0, microbatches=26, batch_size=1)
    assert (only["targets"] == IGNORE).all((1, 2)).tolist() == [False] * 25 + [True]


def test_order_of_a_mixture_is_the_one_of_earlier_versions() -> None:
    order = training_order([4, 3], [2, 1], 3)
    assert [order[i] for i in range(12)] == [3, 1, 5, 0, 2, 6, 2, 1, 4, 3, 0, 6]


@pytest.mark.parametrize("start", [0, 12, 31])
def test_iterator_equals_direct_batches_from_any_position(start: int) -> None:
    data = split(training_order([N], [1], 7))
    rows = slice(2, 4)
    batches = data.batches(start, rows=rows, **SHAPE)
    for step, batch in enumerate(itertools.islice(batches, 9)):
        assert_equal(batch, data.batch(start + 12 * step, rows=rows, **SHAPE))
    batches.close()


@pytest.mark.parametrize(("microbatches", "batch_size"), [(2, 4), (1, 1), (6, 4), (1, 23)])
def test_heldout_samples_count_once_and_what_fills_the_last_batch_for_nothing(
    microbatches: int, batch_size: int
) -> None:
    data, step = split(heldout_order([N], [1])), microbatches * batch_size
    shape = {"microbatches": microbatches, "batch_size": batch_size}
    for _ in range(2):
        batches = list(data.batches(0, **shape))
        taken = np.concatenate([numbers(batch).ravel() for batch in batches])
        np.testing.assert_array_equal(taken[:N], np.arange(N))
        assert (taken[N:] == N - 1).all()
        targets = np.concatenate([batch["targets"].reshape(-1, L) for batch in batches])
        assert len(targets) == -(-N // step) * step
        assert (targets[:N] != IGNORE).all()
        assert (targets[N:] == IGNORE).all()
    end = len(targets)
    with pytest.raises(IndexError, match=f"samples at position {end}: the training data has"):
        data.batch(end, **shape)


def test_parts_of_the_last_heldout_batch_join() -> None:
    data = split(heldout_order([N], [1]))
    parts = [data.batch(12, rows=slice(r, r + 1), **SHAPE) for r in range(4)]
    joined = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
    assert_equal(joined, data.batch(12, **SHAPE))


def test_a_batch_larger_than_the_data() -> None:
    order = training_order([N], [1], 7)
    split(order).batches(0, microbatches=N, batch_size=1).close()
    with pytest.raises(ConfigError, match=r"6 microbatches x 4 samples = 24, but .* has 23: use"):
        split(order).batches(0, microbatches=6, batch_size=4)
    nothing = DataSplit("held-out", "", [], heldout_order([0], [1]))
    with pytest.raises(ConfigError, match="the held-out data has 0"):
        nothing.batches(0, microbatches=1, batch_size=1)


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    batches = split(training_order([N], [1], 7)).batches(0, **SHAPE)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


@pytest.mark.extended
def test_exit_with_an_open_iterator_is_clean() -> None:
    code = """
from jaxpipe.data.batches import DataSplit, training_order
import numpy as np
batches = DataSplit("", "", [{"inputs": np.ones(5)}] * 9, training_order([9], [1], 0)).batches(
    0, microbatches=2, batch_size=2
)
next(batches)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
