"""Packing by lengths: every slot of every document once, no row too full, little padding."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.data.best_fit import SquaresLimit, pack_best_fit
from jaxpipe.data.corpus import STDLIB, _read_sources
from jaxpipe.data.packing import Packing, pack_documents, pack_next_fit

HOW = ["sequential", "best_fit"]


def rows_of(packing: Packing) -> list[list[tuple[int, int, int]]]:
    return [[tuple(piece) for piece in packing.pieces(row)] for row in range(len(packing))]


def padding(packing: Packing) -> float:
    return 1 - int((packing.lengths - 1).sum()) / (len(packing) * packing.seq_len)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 40), st.integers(1, 400), st.sampled_from([1, 2, 17, 33, 161])),
        min_size=1,
        max_size=120,
    ),
    seq_len=st.sampled_from([2, 3, 16, 17, 160]),
    most=st.integers(1, 9),
    how=st.sampled_from(HOW),
    seed=st.integers(0, 3),
    even=st.booleans(),
)
def test_no_slot_is_lost_or_there_twice(lengths, seq_len, most, how, seed, even) -> None:
    packing = pack_documents(np.array(lengths), seq_len, how, most=most, seed=seed, even=even)
    check_all_are_there_once(np.array(lengths), packing, most)


def check_all_are_there_once(lengths: np.ndarray, packing: Packing, most: int) -> None:
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(lengths))}
    for row in rows_of(packing):
        assert 1 <= len(row) <= most
        assert sum(slots for _, _, slots in row) <= packing.seq_len
        for document, begin, slots in row:
            found[document].append((begin, begin + slots))
    for document, pieces in found.items():
        ends = [0, *(end for _, end in sorted(pieces))]
        assert [begin for begin, _ in sorted(pieces)] == ends[:-1]
        assert ends[-1] == lengths[document] - 1


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("most", [3, 64])
def test_no_slot_is_lost_of_many_documents_of_few_lengths(how: str, most: int) -> None:
    """Many rows have equal fillings, and groups of such rows are split again."""
    lengths = np.repeat([12, 6, 5, 3, 2], [60, 40, 15, 90, 70])
    check_all_are_there_once(lengths, pack_documents(lengths, 16, how, most=most), most)


@settings(max_examples=150, deadline=None)
@given(
    mean=st.integers(2, 60), sigma=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
    documents=st.integers(1, 900), seq_len=st.integers(4, 300), most=st.integers(1, 24),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_no_slot_is_lost_where_a_row_may_have_few(mean, sigma, documents, seq_len, most, seed):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean), sigma, documents)
    lengths = drawn.astype(int) + 1
    packing = pack_documents(lengths, seq_len, "best_fit", most=most, even=seed % 2 == 0)
    check_all_are_there_once(lengths, packing, most)


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 5), st.integers(2, 20))
def test_documents_in_order_fill_a_row_until_one_does_not_fit(lengths, most, seq_len) -> None:
    want: list[list[int]] = []
    room, held = 0, most
    for document, length in enumerate(lengths):
        if rest := (length - 1) % seq_len:
            if rest > room or held == most:
                want.append([])
                room, held = seq_len, 0
            want[-1].append(document)
            room, held = room - rest, held + 1
    packing = pack_documents(np.array(lengths, int), seq_len, "sequential", most=most)
    rows = rows_of(packing)
    of_rests = [[piece[0] for piece in row] for row in rows if row[0][2] < seq_len]
    assert of_rests == want
    last = [row[-1][0] for row in rows]
    assert last == sorted(last)  # rows filled by one piece are in document order too


def test_blocks_do_not_show(monkeypatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 500)
    whole = [rows_of(pack_documents(lengths, 32, how, most=4)) for how in HOW]
    monkeypatch.setattr("jaxpipe.data.packing._BLOCK", 256)
    assert rows_of(pack_documents(lengths, 32, "sequential", most=4)) == whole[0]
    starts = pack_next_fit(lengths, 32, 4).starts
    assert len(starts) == sum(row[0][2] < 32 for row in whole[0]) + 1


def lengths_of_web_text(documents: int) -> np.ndarray:
    """Log-normal, with a median of 665 tokens and a mean of 1,366."""
    drawn = np.random.default_rng(1).normal(6.5, 1.2, documents)
    return np.exp(drawn).astype(np.int32) + 2


@pytest.mark.parametrize("seq_len", [512, 2048, 8192])
def test_padding_is_less_than_one_percent(seq_len: int) -> None:
    files = np.array([len(text) for text in _read_sources(STDLIB).values() if text])
    for lengths in (lengths_of_web_text(100_000), files):
        assert padding(pack_documents(lengths, seq_len, "best_fit", most=64)) < 0.01


@pytest.mark.parametrize(
    ("seq_len", "mean", "sigma", "most"),
    [
        (8192, 400, 1.5, 64), (8192, 150, 2.0, 64), (32768, 1366, 1.5, 64),
        (131072, 1366, 1.0, 128), (2048, 150, 1.5, 16), (8192, 1500, 1.5, 8),
    ],
)  # fmt: skip
def test_rows_are_full_of_tokens_where_a_row_may_have_few(seq_len, mean, sigma, most) -> None:
    """Best-fit decreasing alone leaves 8, 36, 11, 18, 30 and 23 % of the slots empty."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000)
    packing = pack_documents(drawn.astype(int) + 2, seq_len, "best_fit", most=most)
    assert packing.worst_fit
    assert padding(packing) < 0.01
    assert not pack_documents(packing.lengths, seq_len, "best_fit", most=1 << 20).worst_fit


def test_best_fit_needs_no_more_rows_than_one_document_at_a_time() -> None:
    """Against textbook best-fit decreasing, one document after the other."""
    rng = np.random.default_rng(2)
    for most in (3, 64):
        lengths = rng.integers(2, 60, 300)
        rows: list[tuple[int, int]] = []  # free slots and documents of each
        for slots in sorted(lengths - 1, reverse=True):
            fits = [i for i, (room, held) in enumerate(rows) if room >= slots and held < most]
            if not fits:
                rows.append((64, 0))
                fits = [len(rows) - 1]
            best = min(fits, key=lambda i: rows[i][0])
            rows[best] = rows[best][0] - slots, rows[best][1] + 1
        packing = pack_documents(lengths, 64, "best_fit", most=most)
        assert len(packing) < len(rows) if packing.worst_fit else len(packing) == len(rows)


def squares(packing: Packing) -> np.ndarray:
    """Sum of squares of each row."""
    return np.array([sum(slots**2 for _, _, slots in row) for row in rows_of(packing)])


@pytest.mark.parametrize(("seq_len", "sigma"), [(131072, 0.5), (32768, 0.5), (131072, 0.8)])
def test_even_rows_are_below_twice_the_mean_or_the_longest_document(seq_len, sigma) -> None:
    """Best-fit decreasing has rows far above both, which no other rows are like."""
    lengths = np.random.default_rng(0).lognormal(7.1, sigma, 100_000).astype(int) + 2
    assert lengths.max() < seq_len
    plain, even = (
        pack_documents(lengths, seq_len, "best_fit", most=1024, even=even) for even in (False, True)
    )
    slots = np.sort(lengths - 1)
    short = slots[np.searchsorted(np.cumsum(slots), seq_len)]  # a row of the shortest is below
    alone = slots[-1] ** 2 + (seq_len - slots[-1]) * short
    limit = max(2 * (slots**2).sum() / slots.sum() * seq_len, alone)
    assert squares(plain).max() > 1.2 * limit
    assert squares(even).max() <= limit
    assert len(even) <= 1.001 * len(plain)


def test_no_document_is_lost_that_waits_for_shorter_ones() -> None:
    """Below any bound, a row is one document, and waits to the end."""
    counts = np.array([0, 0, 3, 1, 0, 2, 0, 0])
    rows = pack_best_fit(counts, 9, np.arange(6), 0, limit=SquaresLimit(0))
    assert sorted(map(rows.documents, rows.numbers)) == [[0], [1], [2], [3], [4], [5]]


def test_rows_that_cannot_be_even_without_padding_are_those_of_best_fit() -> None:
    # 200 rows of a document of 60 would wait for documents of 5, which fill 15 rows.
    lengths = np.repeat([60, 11, 8, 5], [200, 3000, 3000, 300]) + 1
    plain, even = (
        rows_of(pack_documents(lengths, 100, "best_fit", most=64, even=even))
        for even in (False, True)
    )
    assert even == plain


def test_rows_depend_on_the_seed_and_lengths_alone() -> None:
    lengths = lengths_of_web_text(2000)
    one, same, other = (
        rows_of(pack_documents(lengths, 2048, "best_fit", most=64, seed=seed)) for seed in (3, 3, 4)
    )
    assert one == same != other
    assert [[piece[2] for piece in row] for row in one] == [
        [piece[2] for piece in row] for row in other
    ]


def test_rows_are_those_of_earlier_versions() -> None:
    # A checkpoint holds only a position, so its rows must not change with jaxpipe or numpy.
    rows = rows_of(
        pack_documents(np.array([9, 4, 4, 6, 3, 21, 4, 1]), 8, "best_fit", most=4, seed=3)
    )
    assert [[piece[0] for piece in row] for row in rows] == ROWS


ROWS = [[0], [5], [5], [1, 3], [4, 6], [2, 5]]


def test_a_million_documents_are_packed_at_once() -> None:
    started = time.process_time()
    packing = pack_documents(lengths_of_web_text(1_000_000), 8192, "best_fit", most=64)
    assert time.process_time() - started < 3
    started = time.process_time()
    for row in range(0, len(packing), len(packing) // 100):
        packing.pieces(row)
    assert time.process_time() - started < 0.2
