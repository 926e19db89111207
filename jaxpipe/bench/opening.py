"""A large set of documents opened: seconds and memory, with its first batch.

The files are sparse: they are as large as they say, but the disk holds their indices alone.
"""

import argparse
import resource
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args, get_type_hints

import msgspec
import numpy as np

from jaxpipe.config import DataConfig
from jaxpipe.data.manifest import MANIFEST, Manifest, ShardEntry, TokenizerEntry, histogram
from jaxpipe.data.workers import Report, workers
from jaxpipe.data.writing import write_index

_VOCABULARY = 1 << 16
_BATCH = {"microbatches": 8, "batch_size": 8}


class Opened(msgspec.Struct):
    """Seconds of both, and the most bytes that the process had."""

    opening: float
    batch: float
    memory: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `opening`."""
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=200_000, help="of a document, 2 bytes each")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--manifest", action="store_true", help="as a folder that was prepared")
    parser.add_argument("--seq-len", type=int, default=8192)
    packing = get_args(get_type_hints(DataConfig)["packing"])
    parser.add_argument("--packing", choices=packing, default="none")


def run(arguments: argparse.Namespace) -> None:
    """Write the files, open them in a process of its own, and print what it took."""
    with TemporaryDirectory() as folder:
        write_sparse(Path(folder), arguments)
        config = DataConfig(source="file", path=folder, packing=arguments.packing)
        work = partial(open_and_read, seq_len=arguments.seq_len)
        with workers(1, work, iter([config])) as results:
            ((_, took),) = results
    size = arguments.documents * arguments.tokens * 2
    print(
        f"{arguments.documents:,} documents, {size / 1e12:.3g} TB in {arguments.shards} shards: "
        f"opened in {took.opening:.2f} s, first batch {took.batch:.2f} s later, "
        f"{took.memory / 1e6:.0f} MB at most"
    )


def write_sparse(folder: Path, arguments: argparse.Namespace) -> None:
    """Shards of documents of one length, all ids 0, perhaps with their manifest."""
    each, dtype = arguments.documents // arguments.shards, np.dtype("<u2")
    lengths, tokens = np.full(each, arguments.tokens, "<i4"), each * arguments.tokens
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
            longest=arguments.tokens,
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
    from jaxpipe.data.sources import open_data  # brings jax, which its process alone needs

    start = time.perf_counter()
    data = open_data(config, seq_len=seq_len, vocab_size=_VOCABULARY, seed=0, directory=Path())
    opened = time.perf_counter()
    batches = data.train.batches(0, **_BATCH)
    next(batches)
    read = time.perf_counter()
    batches.close()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Opened(opened - start, read - opened, most)
