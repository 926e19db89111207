"""Text to shards, beside the tokenizer alone: tokens a second of both in as many processes.

Alone, every process has read its documents before the clock starts, and only calls the tokenizer,
with as many at a time as `prepare` gives it. `prepare` is timed whole, with the start of its
processes, reading, writing and waiting for the disk.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from jaxpipe.data.pieces import Piece, cut, input_files
from jaxpipe.data.prepare import Options, grouped, prepare
from jaxpipe.data.readers import Reader
from jaxpipe.data.tokenizing import load_tokenizer
from jaxpipe.data.workers import Report, workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `text`."""
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="text, JSON lines")
    parser.add_argument("--tokenizer", required=True, metavar="PATH")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--rounds", type=int, default=3, help="of one after the other")


def run(arguments: argparse.Namespace) -> None:
    """Measure both in turn, and print them and the ratio of every round."""
    options, ratios = Options(tokenizer=arguments.tokenizer), []
    pieces = cut(input_files(arguments.inputs), options.piece_size)
    for number in range(arguments.rounds):
        alone = _alone(pieces, options, arguments.workers)
        whole = _whole(arguments.inputs, options, arguments.workers)
        ratios.append(whole / alone)
        print(
            f"round {number + 1}: {alone:,.0f} tokens/s alone, {whole:,.0f} with prepare: "
            f"{ratios[-1]:.2f}"
        )
    print(f"prepare reaches {median(ratios):.2f} of the tokenizer alone (median)")


def _alone(pieces: list[Piece], options: Options, processes: int) -> float:
    """Tokens a second of the tokenizer in so many processes."""
    tokens, seconds = 0, 0.0
    work = partial(encode_alone, options=options)
    with workers(processes, work, iter(pieces)) as results:
        for _, (of_piece, took) in results:
            tokens += of_piece
            seconds += took
    return tokens / seconds * min(processes, len(pieces))


def encode_alone(piece: Piece, report: Report, *, options: Options) -> tuple[int, float]:
    """Tokens of a piece, and the seconds that the tokenizer takes for them."""
    reader = Reader(options.field, options.skip_bad_lines, lambda size: None)
    tokenizer = load_tokenizer(options.tokenizer)
    documents = grouped(doc for part in piece.parts for doc in reader.documents(part))
    batches = [[text for passages in some for text, _ in passages] for some in documents]
    start = time.perf_counter()
    tokens = sum(len(ids) for batch in batches for ids in tokenizer.encode(batch))
    return tokens, time.perf_counter() - start


def _whole(inputs: list[Path], options: Options, processes: int) -> float:
    """Tokens a second of `prepare`."""
    with TemporaryDirectory() as folder:
        start, quiet = time.perf_counter(), Console(quiet=True)
        manifest = prepare(inputs, Path(folder), options, processes=processes, console=quiet)
        return manifest.tokens / (time.perf_counter() - start)
