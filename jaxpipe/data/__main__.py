"""`python -m jaxpipe.data prepare | inspect`: turn text into shards of token ids.

  prepare INPUT... --tokenizer PATH --out DIR   tokenise text, JSON lines and Parquet
  inspect DIR                                   show what a prepared folder holds

Exit codes: 0 success; 1 a worker was killed; 2 bad input; 7 storage did not answer; 70 an
unexpected error; 130 Ctrl-C. After any interruption the same command continues where it stopped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from typing import Any

from rich.console import Console

from jaxpipe.config import ConfigError
from jaxpipe.config.arguments import Parser
from jaxpipe.config.paths import any_path
from jaxpipe.config.units import parse_bytes, readable_bytes
from jaxpipe.data.prepare.inspection import describe_folder
from jaxpipe.data.prepare.journal import is_unfinished
from jaxpipe.data.prepare.preparation import PrepareOptions, prepare
from jaxpipe.data.prepare.workers import WorkerDiedError
from jaxpipe.data.shards.manifest import JOURNAL, MANIFEST
from jaxpipe.runtime import command
from jaxpipe.runtime.storage.errors import remedy_of
from jaxpipe.runtime.storage.files import folder_size, local_copy
from jaxpipe.runtime.storage.remote_output import remote_output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def run() -> None:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)

    return command.run(
        run,
        failures=(WorkerDiedError,),
        interrupted="interrupted: the same command goes on",
    )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jaxpipe.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    _add_prepare(commands)
    looking = commands.add_parser("inspect", help="show what a prepared folder holds")
    looking.add_argument("folder", type=any_path, metavar="DIR")
    looking.add_argument("--documents", type=int, default=3, help="number of documents to decode")
    looking.set_defaults(run=_inspect)
    return parser


def _add_prepare(commands: Any) -> None:
    making = commands.add_parser("prepare", help="text to shards of token ids")
    making.add_argument(
        "inputs", nargs="+", type=any_path, metavar="INPUT", help="files or folders"
    )
    making.add_argument(
        "--tokenizer", required=True, metavar="PATH",
        help="a tokenizer.json, a model's directory with one, or 'bytes'",
    )  # fmt: skip
    making.add_argument(
        "--out", required=True, type=any_path, metavar="DIR", help="output folder, made if needed"
    )
    making.add_argument(
        "--field", default="",
        help="field with the text; default: messages, prompt and completion, text",
    )  # fmt: skip
    making.add_argument(
        "--ignore", action="append", default=[], metavar="FIELD",
        help="leave out this field although it may change what is trained; can be repeated",
    )  # fmt: skip
    making.add_argument(
        "--eod", default="", metavar="TOKEN",
        help="at the end of every document: a token, its id, or none; default: the eos of the "
        "tokenizer, or none with --chat",
    )  # fmt: skip
    making.add_argument(
        "--bos", default="", metavar="TOKEN",
        help="at the start of every document: a token, its id, or none; default: what the "
        "tokenizer puts before a text, or none with --chat",
    )  # fmt: skip
    making.add_argument(
        "--chat", action="store_true",
        help="read messages only, written by the tokenizer's chat template instead of ChatML",
    )  # fmt: skip
    making.add_argument(
        "--date", default="", type=_date, metavar="YYYY-MM-DD",
        help="the present in chat templates; default: the day on which the folder was begun",
    )  # fmt: skip
    making.add_argument(
        "--pairs", action="store_true",
        help="read a prompt with a chosen and a rejected answer from each record, for train.loss="
        "dpo",
    )  # fmt: skip
    making.add_argument(
        "--workers",
        type=_positive_number,
        default=os.cpu_count(),
        help="number of worker processes",
    )
    making.add_argument(
        "--piece", type=parse_bytes, default="32MiB", metavar="SIZE",
        help="size of an input piece, which becomes a shard and is prepared again after a crash",
    )  # fmt: skip
    making.add_argument(
        "--skip-bad-lines", action="store_true", help="skip and count records that cannot be read"
    )
    making.set_defaults(run=_prepare)


def _date(text: str) -> str:
    try:
        return text and date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date like 2026-01-31") from error


def _positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 or more")
    return int(text)


def _prepare(arguments: argparse.Namespace) -> None:
    options = PrepareOptions(
        tokenizer=arguments.tokenizer,
        eod=arguments.eod,
        bos=arguments.bos,
        date=arguments.date,
        chat=arguments.chat,
        pairs=arguments.pairs,
        field=arguments.field,
        ignored=tuple(sorted({*arguments.ignore})),
        skip_bad_lines=arguments.skip_bad_lines,
        piece_size=arguments.piece,
    )
    inputs = [local_copy(path) for path in arguments.inputs]
    try:
        with remote_output(arguments.out, MANIFEST, JOURNAL, is_unfinished) as out:
            manifest = prepare(inputs, out, options, processes=arguments.workers, console=Console())
        size = folder_size(arguments.out)
    except OSError as error:
        place = str(error.filename or arguments.out)
        raise ConfigError(
            f"{place} cannot be written ({error.strerror}): {remedy_of(error, place)}, or give "
            f"another --out."
        ) from error
    pairs = f"; `python -m jaxpipe.score MODEL {arguments.out}` comes first, and train.loss=dpo"
    print(
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens in {len(manifest.shards)} "
        f"shards in {arguments.out} ({readable_bytes(size)}); left out: {manifest.empty:,} without "
        f"text, {manifest.unlearned:,} in which nothing counts, {manifest.bad_lines:,} that cannot "
        f"be read; to train on them: data.source=file "
        f"data.path={arguments.out}, and model.vocab_size={manifest.tokenizer.vocab_size} or more"
        f"{pairs * arguments.pairs}"
    )


def _inspect(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False)
    for part in describe_folder(local_copy(arguments.folder), arguments.documents):
        console.print(part)


if __name__ == "__main__":
    sys.exit(main())
