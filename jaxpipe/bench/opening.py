"""A large set of documents opened: seconds and memory, with its first batch.

The files are sparse: they are as large as they say, but the disk holds their indices alone.
"""

import argparse
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

import msgspec
import numpy as np

from jaxpipe.bench.memory import peak
from jaxpipe.config import DataConfig
from jaxpipe.data.manifest import MANIFEST, Manifest, ShardEntry, TokenizerEntry, histogram
from jaxpipe.data.workers import Report, workers
from jaxpipe.data.writing import write_index

_VOCABULARY = 1 << 16
_BATCH = {"microbatches": 8, "batch_size": 8}


class Opened(msgspec.Struct):
    """Seconds of both (`cpu`: of the processor), and the most bytes that the process had."""

    opening: float
    cpu: float
    batch: float
    memory: int
    padding: float  # share of the rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `opening`."""
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=200_000, help="of a document, 2 bytes each")
    parser.add_argument(
        "--sigma", type=float, default=0.0, help="lengths are log-normal, with that mean; 0: alike"
    )
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--manifest", action="store_true", help="as a folder that was prepared")
    parser.add_argument("--seq-len", type=int, default=8192)
    packing = get_args(get_type_hints(DataConfig)["packing"])
    parser.add_argument("--packing", choices=packing, default="none")
    parser.add_argument("--max-documents", type=int, default=64)


def run(arguments: argparse.Namespace) -> None:
    """Write the files, open them in a process of its own, and print what it took."""
    with TemporaryDirectory() as folder:
        write_sparse(Path(folder), arguments)
        config = DataConfig(
            source="file", path=folder, packing=arguments.packing,
            max_documents=arguments.max_documents,
        )  # fmt: skip
        work = partial(open_and_read, seq_len=arguments.seq_len)
        with workers(1, work, iter([config])) as results:
            ((_, took),) = results
    size = arguments.documents * arguments.tokens * 2
    print(
        f"{arguments.documents:,} documents, {size / 1e12:.3g} TB in {arguments.shards} shards: "
        f"opened in {took.opening:.2f} s ({took.cpu:.2f} s of the processor), first batch "
        f"{took.batch:.2f} s later, {took.memory / 1e6:.0f} MB at most, {took.padding:.3%} padding"
    )


def write_sparse(folder: Path, arguments: argparse.Namespace) -> None:
    """Shards of documents, in each of the same lengths, all ids 0, perhaps with their manifest."""
    each, dtype = arguments.documents // arguments.shards, np.dtype("<u2")
    drawn = np.exp(np.random.default_rng(0).normal(0, arguments.sigma, each))
    lengths = np.ceil(drawn / drawn.mean() * arguments.tokens).astype("<i4")
    tokens = int(lengths.sum(dtype=np.int64))
    names = [f"{number:06d}" for number in range(arguments.shards)]
    for name in names:
        with (folder / f"{name}.idx").open("wb") as index:
            write_index(index, lengths, dtype)
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(tokens * dtype.itemsize)
    if arguments.manifest:
        shards = tuple(
            ShardEntry(name, dtype.name, each, tokens, tokens, 0, 0, name) for name in names
        )
        manifest = Manifest(
            tokenizer=TokenizerEntry("none", "none", _VOCABULARY, None),
            documents=each * len(names),
            tokens=tokens * len(names),
            counted=tokens * len(names),
            longest=int(lengths.max()),
            smallest_id=0,
            largest_id=0,
            histogram=histogram(lengths),
            empty=0,
            bad_lines=0,
            origin="",
            shards=shards,
        )
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def open_and_read(config: DataConfig, report: Report, *, seq_len: int) -> Opened:
    """Open what a configuration names, and read a batch of it."""
    from jaxpipe.data.sources import Data, open_data  # brings jax, which its process alone needs

    times: list[float] = []
    data: list[Data] = []

    def both() -> None:
        times.extend((time.process_time(), time.perf_counter()))
        sizes = {"seq_len": seq_len, "vocab_size": _VOCABULARY, "seed": 0}
        data.append(open_data(config, **sizes, directory=Path()))
        times.extend((time.process_time(), time.perf_counter()))
        with closing(data[0].train.batches(0, **_BATCH, length_of=lambda _: seq_len)) as batches:
            next(batches)
        times.append(time.perf_counter())

    most, train = peak(both)["peak"], data[0].train
    used_before, start, used, opened, read = times
    padding = 0.0
    if config.documents:
        tokens = (train.samples.packing.lengths - 1).sum(dtype=np.int64)
        padding = 1 - float(tokens) / len(train) / seq_len
    return Opened(opened - start, used - used_before, read - opened, most, padding)
