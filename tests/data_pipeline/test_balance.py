"""Rows by their attention: chosen for a step, and permuted in it; all microbatches are similar."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout import write
from meshes import problem, rows_of

from jaxpipe.config import DataConfig, SourceConfig, load
from jaxpipe.core.executor.reference import losses_and_gradients_ref
from jaxpipe.data import balance as balancing
from jaxpipe.data.balance import BalancedOrder, RowBalance, divide, separate_copies
from jaxpipe.data.batches import DataSplit, training_order
from jaxpipe.data.packing import pack_documents
from jaxpipe.data.sources import RunData, open_data


class Numbered:
    """Samples of only their own number, with random documents."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(count)
        self.documents = [rng.integers(1, 50, rng.integers(1, 6)).tolist() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"inputs": np.array([index])}

    def documents_of(self, index: int) -> list[int]:
        return self.documents[index]


@pytest.mark.extended
@settings(max_examples=50, deadline=None)
@given(
    microbatches=st.integers(1, 5),
    replicas=st.integers(1, 4),
    size=st.integers(1, 3),
    position=st.integers(0, 200),
    seed=st.integers(0, 3),
)
def test_a_step_has_its_rows_wherever_a_run_starts_and_whoever_reads_them(
    microbatches: int, replicas: int, size: int, position: int, seed: int
) -> None:
    samples = Numbered(61)
    data = DataSplit("training", "", samples, training_order([61], [1.0], seed))
    shape = {"microbatches": microbatches, "batch_size": replicas * size}
    balance = RowBalance(size, lambda tokens: tokens**2)
    plain = data.batch(position, **shape)["inputs"]
    mixed = data.batch(position, **shape, balance=balance)["inputs"]
    assert sorted(mixed.ravel()) == sorted(plain.ravel())
    parts = [
        data.batch(position, **shape, balance=balance, rows=slice(r * size, r * size + size))
        for r in range(replicas)
    ]
    np.testing.assert_array_equal(np.concatenate([p["inputs"] for p in parts], axis=1), mixed)
    again = DataSplit("training", "", samples, training_order([61], [1.0], seed))
    later = position + microbatches * replicas * size
    data.batch(later, **shape, balance=balance)  # a batch depends on no other
    np.testing.assert_array_equal(again.batch(position, **shape, balance=balance)["inputs"], mixed)


def test_iterator_balances_every_batch() -> None:
    data = DataSplit("training", "", Numbered(61), training_order([61], [1.0], 0))
    shape = {"microbatches": 3, "batch_size": 4, "balance": RowBalance(2, float)}
    batches = data.batches(12, **shape)
    for position in (12, 24):
        want = data.batch(position, **shape)["inputs"]
        np.testing.assert_array_equal(next(batches)["inputs"], want)
    batches.close()


def lockstep_time(costs: np.ndarray, ranks: int) -> float:
    """Time of 1F1B on equal ranks that wait for each other, and for all replicas, in each tick.

    `costs [M, R]` are those of F and BW together, of which F is a third.
    """
    padded = np.pad(costs, ((2 * ranks, 2 * ranks), (0, 0)))
    rank = np.arange(ranks)
    return sum(
        (padded[tick - rank] / 3 + padded[tick - 2 * ranks + 1 + rank] * 2 / 3).max()
        for tick in range(2 * ranks, len(padded))
    )


@cache
def log_normal_rows(
    seq_len: int, mean: int, sigma: float, count: int = 60_000
) -> tuple[list[list[int]], float]:
    """Return shuffled rows of `count` documents in all, and the share of padding."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).astype(int) + 2
    packing = pack_documents(lengths, seq_len, "best_fit", most=1024)
    rows = [[piece.slots for piece in packing.pieces(row)] for row in range(len(packing))]
    padding = 1 - (lengths - 1).sum() / len(rows) / seq_len
    return [rows[row] for row in rng.permutation(len(rows))], padding


MODEL = load("configs/llama3_8b_pp4.toml").model
ATTENTION = cache(MODEL.attention_flops)


def flops(rows: list[list[int]], seq_len: int) -> np.ndarray:
    """FLOPs of rows of `seq_len` tokens with these documents, `[rows]`; attention is causal."""
    linear = seq_len * MODEL.flops_per_token(0)
    return np.array([linear + sum(map(ATTENTION, row)) / 2 for row in rows])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize(
    ("seq_len", "mean", "sigma", "even"), [(8192, 1366, 1, 2), (32768, 4000, 1.5, 4)]
)
def test_microbatches_of_log_normal_documents_cost_the_same(
    seq_len: int, mean: int, sigma: float, even: int, replicas: int, size: int
) -> None:
    """Groups of at least `even` rows are even; smaller groups run in ticks with similar ones."""
    rows, padding = log_normal_rows(seq_len, mean, sigma)
    microbatches = 24
    assert padding <= 0.01
    for first in range(3):
        step = microbatches * replicas * size
        documents = rows[first * step : (first + 1) * step]
        costs = flops(documents, seq_len)
        places = RowBalance(size, ATTENTION).places(documents, microbatches)
        before, after = (
            costs[order].reshape(microbatches, replicas, size).sum(-1)
            for order in (np.arange(step).reshape(places.shape), places)
        )
        if size >= even:
            assert after.max() / after.mean() <= 1.03
        best = lockstep_time(np.full_like(after, after.mean()), 4)
        assert lockstep_time(after, 4) / best <= 1.03
        assert lockstep_time(before, 4) / best > lockstep_time(after, 4) / best + 0.01
        assert after.sum(0).max() / after.sum(0).mean() <= 1.003


@pytest.mark.parametrize(
    ("seq_len", "sigma", "size", "step"),
    [(32768, 1.5, 1, 64), (32768, 1.5, 2, 4), (131072, 1.5, 4, 16), (131072, 2.0, 4, 8)],
)
def test_no_step_of_a_block_has_a_microbatch_that_others_wait_for(
    seq_len: int, sigma: float, size: int, step: int
) -> None:
    """The largest cost of each step is at most 1.03 of its mean; in the given order it is more."""
    rows, padding = log_normal_rows(seq_len, 4000, sigma, 10_000 * seq_len // 4000)
    assert padding <= 0.01
    costs, given_order = flops(rows, seq_len), range(len(rows))
    order = BalancedOrder(given_order, rows.__getitem__, step, len(rows), 0)

    def largest_over_mean(first: int, order: Sequence[int]) -> float:
        numbers = np.array([order[first + at] for at in range(step)])
        documents = [rows[number] for number in numbers]
        places = RowBalance(size, ATTENTION).places(documents, step // size)
        groups = costs[numbers][places].sum(axis=1)
        return groups.max() / groups.mean()

    firsts = range(0, order.window, step)
    assert max(largest_over_mean(first, order) for first in firsts) <= 1.03
    assert max(largest_over_mean(first, given_order) for first in firsts[:100]) > 1.035


@pytest.mark.extended
@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 9), seed=st.integers(0, 3), most=st.sampled_from([16, 1 << 16]),
    step=st.integers(1, 7),
)  # fmt: skip
def test_windows_keep_their_rows_in_blocks_of_similar_attention(
    size: int, seed: int, most: int, step: int
) -> None:
    samples = Numbered(61)
    given_order = training_order([61], [1.0], seed)

    def balanced() -> BalancedOrder:
        return BalancedOrder(given_order, samples.documents_of, size, 61, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancing, "_WINDOW", most)
        order = balanced()
        window = order.window
        assert window % size == 0
        assert window <= most
        assert 61 - 61 // window * window < size * -(-61 // most)
        for first in (0, 3 * window):
            numbers = [order[first + at] for at in range(window)]
            assert sorted(numbers) == sorted(given_order[first + at] for at in range(window))
            given = [given_order[first + at] for at in range(window)]
            squares = [sum(n * n for n in samples.documents_of(number)) for number in given]
            want = np.array(given)[divide(np.array(squares), size)]
            separate_copies(want)
            assert sorted(np.reshape(numbers, (-1, size)).tolist()) == sorted(want.tolist())
        resumed = balanced()  # a run that resumes in the middle, with steps of another size
        middle = window // 2 + step
        assert [resumed[at] for at in range(middle, middle + 20)] == [
            order[at] for at in range(middle, middle + 20)
        ]


@pytest.mark.parametrize(("rows", "size"), [(1000, 256), (1000, 64), (5000, 512)])
def test_no_step_has_a_row_twice_where_an_epoch_ends_within_a_window(rows: int, size: int) -> None:
    costs = np.random.default_rng(0).lognormal(6, 0.5, rows).astype(int)
    given_order = training_order([rows], [1.0], 0)
    order = BalancedOrder(given_order, lambda row: [costs[row]], size, rows, 0)
    blocks = np.array([order[at] for at in range(3 * order.window)]).reshape(-1, size)
    assert all(len(np.unique(block)) == size for block in blocks)
    given = np.array([given_order[at] for at in range(3 * order.window)])
    windows = np.split(given, 3)
    divided = np.concatenate([window[divide(costs[window] ** 2, size)] for window in windows])
    assert any(len(np.unique(block)) < size for block in divided)
    assert sorted(blocks.ravel()) == sorted(given)

    def mean_ratio(blocks: np.ndarray) -> float:
        return (costs[blocks].max(axis=1) / costs[blocks].mean(axis=1)).mean()

    assert mean_ratio(divided) <= mean_ratio(blocks) < 0.7 * mean_ratio(given.reshape(-1, size))


def loss(costs: np.ndarray) -> float:
    """What `divide` makes small, of one run, by its costs `[blocks, size]`."""
    return len(costs) * (costs.max() / costs.mean() - 1) ** 4


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_no_other_runs_of_blocks_are_more_even(blocks: int, size: int, seed: int) -> None:
    """`divide` against all divisions of the sorted rows into runs."""
    rng = np.random.default_rng(seed)
    costs = np.round(np.exp(rng.normal(3, 1, blocks * size))).astype(int) + 1
    ranked = np.sort(costs)[::-1]

    def divisions(first: int) -> list[tuple[float, list[list[int]]]]:
        if first == blocks:
            return [(0.0, [])]
        found = []
        for end in range(first + 1, blocks + 1):
            run = ranked[first * size : end * size].reshape(size, -1).T
            found += [(loss(run) + rest, [*run.tolist(), *more]) for rest, more in divisions(end)]
        return found

    divided = divide(costs, size)
    assert sorted(divided.ravel()) == list(range(len(costs)))
    all_divisions = divisions(0)
    least = min(total for total, _ in all_divisions)
    best = [found for total, found in all_divisions if total <= least + 1e-12]
    assert costs[divided].tolist() in best


def test_an_epoch_has_each_row_once_and_its_blocks_differ_from_those_of_the_next() -> None:
    samples = Numbered(64)
    order = BalancedOrder(training_order([64], [1.0], 0), samples.documents_of, 8, 64, 0)
    epochs = np.reshape([order[at] for at in range(192)], (3, 64))
    assert (np.sort(epochs) == np.arange(64)).all()
    blocks = [[frozenset(block) for block in epoch.reshape(8, 8)] for epoch in epochs]
    assert blocks[0] != blocks[1] != blocks[2]


def test_rows_are_those_of_earlier_versions() -> None:
    # A checkpoint holds only a position, so its rows must not change with jaxpipe or numpy.
    order = BalancedOrder(range(12), lambda row: [5 * row % 12, 1], 2, 6, 3)
    assert [order[at] for at in range(12)] == [5, 0, 1, 3, 2, 4, 7, 9, 11, 6, 8, 10]


def opened(path: Path, **how: Any) -> RunData:
    config = DataConfig(source="file", path=str(path), packing="best_fit", **how)
    return open_data(config, seq_len=16, vocab_size=256, seed=7, directory=path.parent)


def test_a_run_resumes_in_the_middle_of_a_window(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 256, n).tolist()] for n in rng.integers(2, 16, 200)]
    path = write(tmp_path / "shard.bin", documents, "uint16")
    shape = {"microbatches": 2, "batch_size": 2, "length_of": lambda _: 16}
    data, plain, one = (opened(path, balance_rows=size) for size in (4, 0, 1))
    batches = data.train.batches(0, **shape)
    steps = [next(batches) for _ in range(12)]
    batches.close()
    resumed = opened(path, balance_rows=4).train.batches(20, **shape)
    for step in steps[5:]:
        for name, leaf in next(resumed).items():
            np.testing.assert_array_equal(leaf, step[name])
    resumed.close()
    assert data.train.fingerprint != plain.train.fingerprint == one.train.fingerprint
    assert data.heldout.fingerprint == plain.heldout.fingerprint
    positions = range(12)
    assert [one.train.order[at] for at in positions] == [plain.train.order[at] for at in positions]
    assert [data.train.order[at] for at in positions] != [plain.train.order[at] for at in positions]


def test_rows_that_are_balanced_are_packed_evenly(tmp_path: Path) -> None:
    documents = [[[65] * tokens] for tokens in [6] * 6 + [2] * 400]
    path = write(tmp_path / "shard.bin", documents, "uint16")
    longest = []
    for size in (0, 1, 2):
        samples = opened(path, balance_rows=size).train.samples
        rows = [samples.documents_of(row) for row in range(len(samples))]
        longest.append(max(row.count(5) for row in rows))
    assert longest == [3, 3, 1]


def test_a_window_is_shorter_than_the_epoch_of_a_small_source(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = [
        write(tmp_path / f"{count}.bin", [[rng.integers(0, 256, 17).tolist()]] * count, "uint16")
        for count in (50, 400)
    ]
    sources = tuple(SourceConfig(path=str(path), weight=0.5) for path in paths)
    config = DataConfig(sources=sources, packing="best_fit", balance_rows=4)
    data = open_data(config, seq_len=16, vocab_size=256, seed=7, directory=tmp_path)
    small = data.train.sources[0].samples
    assert 0 < 2 * small - data.train.order.window < 4


def test_losses_and_gradients_are_those_of_rows_in_order() -> None:
    with jax.enable_x64(True):
        decoder, shared, layers, batch = problem("packed", jnp.float64)
        batch = {name: leaf[:3] for name, leaf in batch.items()}
        microbatches = len(batch["inputs"])
        documents = [row for of_microbatch in rows_of(batch) for row in of_microbatch]
        places = RowBalance(2, lambda tokens: tokens**2).places(documents, microbatches)
        assert (places.ravel() != np.arange(places.size)).any()
        mixed = {
            name: leaf.reshape(-1, *leaf.shape[2:])[places.ravel()].reshape(leaf.shape)
            for name, leaf in batch.items()
        }
        step = jax.jit(
            lambda rows: losses_and_gradients_ref(decoder.functions, shared, layers, rows)
        )
        (losses, gradients), (other_losses, other) = step(batch), step(mixed)
        np.testing.assert_allclose(losses.sum(), other_losses.sum(), rtol=1e-12)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), gradients, other
        )
