"""Documents packed on opening: padding, seconds and memory, of a sparse file with real lengths.

The lengths are log-normal (sigma 1.2), which is near those of web text; there are no tokens. Each
way to pack is a process of its own, whose peak memory is shown whole.
"""

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpipe.config import DataConfig
from jaxpipe.data.indexed import CODES, HEADER, MAGIC
from jaxpipe.data.sources import open_data

_BATCH = {"microbatches": 8, "batch_size": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--documents", type=int, default=10_000_000, metavar="N", help="(10 million)")
    add("--mean", type=int, default=1366, metavar="TOKENS", help="of a document (1366)")
    add("--seq-len", type=int, default=8192, metavar="TOKENS", help="of a row (8192)")
    add("--max-documents", type=int, default=64, metavar="N", help="of a row (64)")


def run(arguments: argparse.Namespace) -> None:
    """Measure both ways to pack, and print a table."""
    table = Table("packing", "rows", "padding", "opening", "CPU", "first batch", "process")
    with TemporaryDirectory() as folder:
        path = sparse_shard(Path(folder), arguments.documents, arguments.mean)
        for how in ("best_fit", "sequential"):
            config = DataConfig(
                source="file", path=str(path), packing=how, max_documents=arguments.max_documents
            )
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                table.add_row(how, *pool.apply(measure, (config, arguments.seq_len)))
        size = path.stat().st_size
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{arguments.documents:,} documents, a sparse file of {size / 1e12:.3g} TB")


def sparse_shard(folder: Path, documents: int, mean: float) -> Path:
    """A shard of documents of zeros, of which the disk holds the index alone."""
    drawn = np.exp(np.random.default_rng(0).normal(0, 1.2, documents))
    lengths = (drawn / drawn.mean() * mean).astype("<i4") + 1
    starts = np.zeros(documents + 1, "<i8")
    np.cumsum(lengths, out=starts[1:])
    path, dtype = folder / "sparse.bin", np.dtype("<u2")
    with path.with_suffix(".idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
        for part in (lengths, starts[:-1] * dtype.itemsize, np.arange(documents + 1, dtype="<i8")):
            index.write(part.tobytes())
    with path.open("wb") as file:
        file.truncate(int(starts[-1]) * dtype.itemsize)
    return path


def measure(config: DataConfig, seq_len: int) -> list[str]:
    """Open a source and read a batch; the cells of its row."""
    begun, used = time.perf_counter(), time.process_time()
    sizes = {"seq_len": seq_len, "vocab_size": 1 << 16, "seed": 0}
    train = open_data(config, **sizes, directory=Path(config.path).parent).train
    opened, used = time.perf_counter(), time.process_time() - used
    train.batch(len(train) // 2, **_BATCH, length_of=lambda longest: seq_len)
    read = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens = int((train.samples.packing.lengths - 1).sum(dtype=np.int64))
    return [
        f"{len(train):,}",
        f"{1 - tokens / len(train) / seq_len:.3%}",
        f"{opened - begun:.2f} s",
        f"{used:.2f} s",
        f"{read - opened:.2f} s",
        f"{peak / 1e6:.0f} MB",
    ]
