"""`bench zigzag`: packed documents in a ring of replicas, dealt whole rows at a time or one by one.

A ring's device has two stretches of a row, one early and one late. Where a row is one text, that is
as much causal work for all; documents that do not see each other leave less, and more on one device
than on another, and in each turn of the ring all wait for the slowest. Dealing every document in
that way by itself leaves all alike, but its length must be a multiple of twice the devices, and its
parts, which are small, do not fill a kernel's tiles. Here rows of documents are dealt both ways,
and scores are counted that are made by the slowest device of each turn, over its even share of
those that are seen: in the half blocks that `jaxpipe/model/ring.py` makes or leaves out, and in
tiles, as a kernel could.

Lengths are drawn log-normal, or those of the Python files of the standard library.
"""

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpipe.bench.options import at_least_one, markdown
from jaxpipe.data.packing import pack

_TILE = 128  # queries, and keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--seq-len", type=int, default=16384)
    add("--devices", type=int, default=4)
    add("--rows", type=int, default=16, help="so many of all that are packed, evenly chosen (16)")
    add("--mean", type=int, default=0, help="tokens of a document; 0: those of Python files, bytes")
    add("--sigma", type=float, default=1.2, help="of the logarithm of lengths, with a mean (1.2)")


def run(arguments: argparse.Namespace) -> None:
    """Pack, deal both ways, count, and print the table."""
    at_least_one(devices=arguments.devices, rows=arguments.rows)
    lengths, devices = _lengths(arguments), arguments.devices
    table = []
    for name, multiple, deal in (("rows", 1, whole_row), ("documents", 2 * devices, each_alone)):
        # A document of n tokens is n - 1 slots.
        padded = -(-(lengths - 1) // multiple) * multiple + 1
        rows = rows_of(padded, arguments.seq_len, arguments.rows)
        filled = np.mean([row.sum() / arguments.seq_len for row in rows])
        filled *= (lengths - 1).sum() / (padded - 1).sum()
        share = sum(_seen(row) for row in rows) / devices
        made = {"half blocks": halves_made, f"tiles of {_TILE}": tiles_made}
        for unit, count in made.items():
            total = sum(count(row, deal(row, devices)) for row in rows)
            table.append([name, unit, f"{total / share:.2f}", f"{1 - filled:.1%}"])
    print(f"{len(lengths):,} documents of {lengths.mean():,.0f} tokens in the mean")
    print(markdown(["dealt", "made in", "made / seen", "padding"], table))


def _lengths(arguments: argparse.Namespace) -> np.ndarray:
    """Tokens of every document, 2 or more."""
    if arguments.mean:
        drawn = np.exp(np.random.default_rng(0).normal(0, arguments.sigma, 20_000))
        lengths = np.ceil(drawn / drawn.mean() * arguments.mean)
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
        own = [file for file in files if "site-packages" not in file.parts]
        lengths = np.array([file.stat().st_size for file in own])
    return np.maximum(lengths, 2).astype(np.int64)


def rows_of(lengths: np.ndarray, seq_len: int, count: int) -> list[np.ndarray]:
    """Lengths of the documents in some of the rows that best fit makes; 0 are left out.

    >>> [sorted(row.tolist()) for row in rows_of(np.array([5, 4, 7]), 8, 2)]
    [[6], [3, 4]]
    """
    packed = pack(lengths, seq_len, "best_fit", most=seq_len, seed=0)
    chosen = np.linspace(0, len(packed) - 1, min(count, len(packed))).astype(int)
    return [np.array([piece.slots for piece in packed.pieces(int(row))]) for row in chosen]


def whole_row(row: np.ndarray, devices: int) -> list[np.ndarray]:
    """Places of every device's tokens in the row: its i-th stretch and the i-th from the end."""
    return _zigzag(np.arange(row.sum()), devices)


def each_alone(row: np.ndarray, devices: int) -> list[np.ndarray]:
    """The same of every document by itself."""
    ends = row.cumsum()
    parts = [_zigzag(np.arange(end - n, end), devices) for n, end in zip(row, ends)]
    return [np.concatenate(own) for own in zip(*parts)]


def _zigzag(places: np.ndarray, devices: int) -> list[np.ndarray]:
    parts = np.array_split(places, 2 * devices)
    return [np.concatenate([parts[i], parts[-1 - i]]) for i in range(devices)]


def _seen(row: np.ndarray) -> int:
    """Pairs of a token and one that it sees."""
    return int((row * (row + 1) // 2).sum())


def halves_made(row: np.ndarray, dealt: list[np.ndarray]) -> int:
    """Scores of all turns: of own tokens the causal half, in others half blocks with a key seen.

    Late queries and early keys are one, and another is chosen by whose keys came first.
    """
    half = len(dealt[0]) // 2

    def made(device: int, turn: int) -> int:
        queries, keys = dealt[device], dealt[device - turn]
        chosen = slice(half) if device >= turn else slice(half, None)
        blocks = (queries[half:], keys[:half]), (queries[chosen], keys[chosen])
        return half**2 * sum(_any_seen(row, *block) for block in blocks)

    own = 2 * half * (2 * half + _TILE) // 2
    return own + _slowest(made, len(dealt), range(1, len(dealt)))


def tiles_made(row: np.ndarray, dealt: list[np.ndarray]) -> int:
    """Scores of tiles with a key seen, of all turns."""

    def made(device: int, turn: int) -> int:
        queries, keys = (
            [own[i : i + _TILE] for i in range(0, len(own), _TILE)]
            for own in (dealt[device], dealt[device - turn])
        )
        return _TILE**2 * sum(_any_seen(row, some, there) for some in queries for there in keys)

    return _slowest(made, len(dealt), range(len(dealt)))


def _slowest(made: Callable[[int, int], int], devices: int, turns: range) -> int:
    return sum(max(made(device, turn) for device in range(devices)) for turn in turns)


def _any_seen(row: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> bool:
    """Whether some query sees some key; both are places in order."""
    ends = row.cumsum()
    begins = ends - row
    if keys[0] > queries[-1] or keys[-1] < begins[ends.searchsorted(queries[0], "right")]:
        return False
    first = begins[ends.searchsorted(queries, "right")][:, None]
    return bool(((keys <= queries[:, None]) & (keys >= first)).any())
