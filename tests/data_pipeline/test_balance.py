"""Rows of a step permuted by their attention: the same rows and sums, similar microbatches."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import problem, rows_of

from jaxpipe.config import load
from jaxpipe.data.balance import RowBalance
from jaxpipe.data.batches import DataSplit, training_order
from jaxpipe.data.packing import pack_documents
from jaxpipe.pipeline.reference import losses_and_gradients_ref


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
def log_normal_rows(seq_len: int, mean: int, sigma: float) -> tuple[list[list[int]], float]:
    """Return the documents of shuffled rows, and the share of padding."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 60_000).astype(int) + 2
    packing = pack_documents(lengths, seq_len, "best_fit", most=256)
    rows = [[piece.slots for piece in packing.pieces(row)] for row in range(len(packing))]
    padding = 1 - (lengths - 1).sum() / len(rows) / seq_len
    return [rows[row] for row in rng.permutation(len(rows))], padding


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
    model, microbatches = load("configs/llama3_8b_pp4.toml").model, 24
    attention = cache(model.attention_flops)
    assert padding <= 0.01
    for first in range(3):
        step = microbatches * replicas * size
        documents = rows[first * step : (first + 1) * step]
        costs = np.array(
            [
                seq_len * model.flops_per_token(0) + sum(map(attention, row)) / 2  # causal
                for row in documents
            ]
        )
        places = RowBalance(size, attention).places(documents, microbatches)
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
