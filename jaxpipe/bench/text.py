"""Text to shards, beside the tokenizer alone: tokens a second of both in as many processes.

Alone, every process has read its documents before the clock starts, and only calls the tokenizer,
with as many at a time as `prepare` gives it. `prepare` is timed whole, with the start of its
processes, reading, writing and waiting for the disk. Seconds of the clock are those of a machine
that does nothing else; the processor's own seconds are not disturbed by neighbours, but leave out
waiting.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console

from jaxpipe.config.units import parse_bytes
from jaxpipe.data.pieces import Piece, cut, input_files
from jaxpipe.data.prepare import Options, grouped, prepare
from jaxpipe.data.readers import Reader
from jaxpipe.data.records import Records
from jaxpipe.data.tokenizing import load_tokenizer
from jaxpipe.data.workers import Report, workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `text`."""
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="text, JSON lines")
    parser.add_argument("--tokenizer", required=True, metavar="PATH")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--piece", type=parse_bytes, default="32MiB", metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=3, help="of one after the other")


def run(arguments: argparse.Namespace) -> None:
    """Measure both in turn, and print them and the ratio of every round."""
    options = Options(tokenizer=arguments.tokenizer, piece_size=arguments.piece)
    pieces = cut(input_files(arguments.inputs).files, options.piece_size)
    ratios: list[Rates] = []
    for number in range(1, arguments.rounds + 1):
        alone = _alone(pieces, options, arguments.workers)
        whole = _whole(arguments.inputs, options, arguments.workers)
        ratios.append(Rates(*(a / b for a, b in zip(whole, alone))))
        print(
            f"round {number}: {alone.clock:,.0f} tokens/s alone, {whole.clock:,.0f} with prepare: "
            f"{ratios[-1].clock:.2f}; of the processor {ratios[-1].processor:.2f}"
        )
    clock, processor = map(median, zip(*ratios))
    print(
        f"prepare reaches {clock:.2f} of the tokenizer alone, by the processor's seconds "
        f"{processor:.2f} (medians)"
    )


class Rates(NamedTuple):
    """Tokens a second of all processes."""

    clock: float
    processor: float  # a second of a processor's work, times the processes


def _alone(pieces: list[Piece], options: Options, processes: int) -> Rates:
    """The tokenizer in so many processes."""
    processes = min(processes, len(pieces))
    with workers(processes, partial(encode_alone, options=options), iter(pieces)) as results:
        tokens, seconds, busy = map(sum, zip(*(took for _, took in results)))
    return Rates(tokens / seconds * processes, tokens / busy * processes)


def encode_alone(piece: Piece, report: Report, *, options: Options) -> tuple[int, float, float]:
    """Tokens of a piece; the seconds that the tokenizer takes for them, and the processor's."""
    reader = Reader(Records(options.field), options.skip_bad_lines, lambda size: None)
    tokenizer = load_tokenizer(options.tokenizer)
    batches = list(grouped(doc for part in piece.parts for doc in reader.documents(part)))
    start, busy = time.perf_counter(), time.process_time()
    tokens = sum(len(one.ids) for batch in batches for one in tokenizer.encode(batch))
    return tokens, time.perf_counter() - start, time.process_time() - busy


def _whole(inputs: list[Path], options: Options, processes: int) -> Rates:
    """`prepare` in so many processes, and in this one."""
    with TemporaryDirectory() as folder:
        start, busy = time.perf_counter(), _processor_seconds()
        quiet = Console(quiet=True)
        manifest = prepare(inputs, Path(folder), options, processes=processes, console=quiet)
        seconds, busy = time.perf_counter() - start, _processor_seconds() - busy
    return Rates(manifest.tokens / seconds, manifest.tokens / busy * processes)


def _processor_seconds() -> float:
    """Of this process and those that it has waited for."""
    return sum(os.times()[:4])
