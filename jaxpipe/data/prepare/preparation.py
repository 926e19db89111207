"""Tokenise text into shards with several processes, so that a killed run can continue.

Every piece of the inputs becomes one shard. A journal in the folder lists the complete shards; the
manifest replaces it when all are complete. The result depends on the inputs and the options alone,
not on the number of processes or on how often they were killed.
"""

import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxpipe.config import ConfigError
from jaxpipe.data.pairs import OF_PAIR
from jaxpipe.data.prepare.chat_templates import (
    ChatTemplate,
    find_end_of_turn,
    load_chat_template,
    sources_of,
)
from jaxpipe.data.prepare.input_pieces import InputPiece, divide_files, list_input_files
from jaxpipe.data.prepare.journal import (
    PieceResult,
    complete_folder,
    lock_folder,
    open_journal,
    read_date,
    read_finished,
)
from jaxpipe.data.prepare.progress import show_progress
from jaxpipe.data.prepare.readers import DocumentReader
from jaxpipe.data.prepare.records import ChatML, ConversationWriter, Passages, RecordConverter
from jaxpipe.data.prepare.tokenizing import (
    Tokenizer,
    describe_chat_fault,
    describe_tokenizer,
    load_tokenizer,
)
from jaxpipe.data.prepare.workers import Report, Work, run_workers
from jaxpipe.data.prepare.writing import DocumentBatch, write_shard
from jaxpipe.data.shards.manifest import (
    FolderManifest,
    TokenizerEntry,
    build_histogram,
    merge_histograms,
)
from jaxpipe.tokenizer.files import TokenizerFiles

_BATCH = 1 << 18  # characters tokenised per call
_IN_CHATML = "messages are written in ChatML, not by the tokenizer's chat template: --chat uses it"
_FORM = 3  # version of the output; increase it if the same text gives other ids or another mask


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What determines the documents of a folder, besides the inputs."""

    tokenizer: str  # see `load_tokenizer`
    eod: str = ""  # see `describe_tokenizer`; with `chat` empty is none: templates write the end
    bos: str = ""  # see `describe_tokenizer`; with `chat` empty is none: templates write it
    date: str = ""  # YYYY-MM-DD that chat templates take for the present; empty: of the first start
    chat: bool = False  # read messages only, and write them by the tokenizer's chat template
    pairs: bool = False  # a record has two answers to one prompt; each is a document
    field: str = ""  # see `RecordConverter`
    ignored: tuple[str, ...] = ()  # see `RecordConverter`
    skip_bad_lines: bool = False
    piece_size: int = 32 << 20  # bytes of the inputs on disk per shard, or a little more


def prepare(
    inputs: Iterable[Path],
    folder: Path,
    options: PrepareOptions,
    *,
    processes: int,
    console: Console,
) -> FolderManifest:
    """Write the documents of all inputs to shards in a folder, and return its manifest.

    An incomplete folder is continued: shards of the same inputs and options stay. A complete folder
    is left as it is.

    Raises:
      ConfigError: for inputs that cannot be read, a folder with other content, or no document.
      WorkerDied: where a process is killed.
    """
    pieces = _find_pieces(inputs, folder, options.piece_size, console)
    eod, bos = (named or "none" * options.chat for named in (options.eod, options.bos))
    known = TokenizerFiles.read(options.tokenizer)
    tokenizer = load_tokenizer(known)
    date = options.date or read_date(folder) or datetime.now().strftime("%Y-%m-%d")
    template = load_chat_template(known, date) if options.chat else None
    writer = template or ChatML(describe_chat_fault(known, tokenizer))
    entry = describe_tokenizer(known, tokenizer, eod, bos)
    keys = [_piece_key(piece, options, entry, template, known.digest) for piece in pieces]
    origin = hashlib.blake2b(" ".join(keys).encode(), digest_size=16).hexdigest()
    with lock_folder(folder):
        if manifest := read_finished(folder, origin):
            return manifest
        with open_journal(folder, keys, options.skip_bad_lines) as (journal, done):
            remaining = [piece for piece in pieces if piece.number not in done]
            unused = None if template else known.chat_templates
            work = partial(
                write_piece, options=options, known=known, entry=entry, writer=writer, folder=folder
            )
            with closing(_write_pieces(pieces, remaining, work, processes, console)) as results:
                for result in results:
                    one = msgspec.structs.replace(result, key=keys[result.piece], date=date)
                    journal.write(msgspec.json.encode(one) + b"\n")
                    os.fsync(journal.fileno())
                    done[one.piece] = one
                    if one.chats and unused:
                        _print_sentence(console, _IN_CHATML)
                        unused = None  # print it only once
            written = [done[piece.number] for piece in pieces]
            has_chats = any(one.chats for one in written)
            manifest = _build_manifest(
                written, entry, origin, pairs=options.pairs, date=date,
                end_of_turn=find_end_of_turn(writer, tokenizer) if has_chats else None,
            )  # fmt: skip
            if not manifest.documents:
                what = "that counts in the loss " if manifest.unlearned else ""
                raise ConfigError(f"there is no text {what}in the inputs of {folder}: give others.")
            kept = known.with_templates(sources_of(writer)) if has_chats else known
            complete_folder(folder, manifest, kept)
    return manifest


def _find_pieces(
    inputs: Iterable[Path], folder: Path, size: int, console: Console
) -> list[InputPiece]:
    """Divide the inputs into pieces of about `size` bytes; print which files are left out."""
    files, left_out = list_input_files(list(inputs), folder)
    if left_out:
        _print_sentence(
            console,
            f"left out beside files of records: {_join_files(left_out)}; name those to read",
        )
    return divide_files(files, size)


def _write_pieces(
    pieces: list[InputPiece],
    remaining: list[InputPiece],
    work: Work,
    processes: int,
    console: Console,
) -> Generator[PieceResult]:
    """Run `work` on the remaining pieces in processes, with a progress bar; yield the results."""
    with (
        run_workers(min(processes, len(remaining)), work, iter(remaining)) as messages,
        show_progress(pieces, remaining, console) as show,
    ):
        for is_result, value in messages:
            if is_result:
                yield value
            else:
                show(*value)


def write_piece(
    piece: InputPiece,
    report: Report,
    *,
    options: PrepareOptions,
    known: TokenizerFiles,
    entry: TokenizerEntry,
    writer: ConversationWriter,
    folder: Path,
) -> PieceResult:
    """Write a piece to its shard, and report input bytes and tokens as they are processed."""
    tokenizer, read, empty, unlearned = _loaded(known), 0, 0, 0
    together = OF_PAIR if options.pairs else 1

    def advance(size: int) -> None:
        nonlocal read
        read += size

    def batches() -> Iterator[DocumentBatch]:
        nonlocal read, empty, unlearned
        for documents in group_documents(
            (doc for part in piece.parts for doc in reader.documents(part)), together
        ):
            batch, without_text = tokenise(documents, tokenizer, entry.eod, together, bos=entry.bos)
            empty += without_text
            unlearned += len(documents) - len(batch.lengths) - without_text
            report((read, len(batch.ids)))
            read = 0
            if len(batch.lengths):
                yield batch

    ignored = frozenset(options.ignored)
    reserved = chr(entry.eod) if known.is_bytes and entry.eod is not None else ""
    records = RecordConverter(options.field, ignored, writer, options.chat, options.pairs, reserved)
    reader = DocumentReader(records, options.skip_bad_lines, advance)
    dtype = np.dtype("<u2" if entry.vocab_size <= 1 << 16 else "<i4")
    written = write_shard(folder, f"{piece.number:06d}", dtype, batches())
    report((read, 0))
    shard, lengths = written or (None, np.zeros(0, int))
    bars, longest = build_histogram(lengths), int(lengths.max(initial=0))
    return PieceResult(
        piece.number, "", shard, bars, longest, empty, reader.bad, unlearned, records.chats
    )


def tokenise(
    documents: list[Passages],
    tokenizer: Tokenizer,
    eod: int | None,
    together: int = 1,
    *,
    bos: Sequence[int] = (),
) -> tuple[DocumentBatch, int]:
    """Tokenise documents, and leave out those without text or without a token in the loss.

    The id `eod` is appended to each document and counts in the loss if the last passage does. A
    text that already ends with that token, white space aside, gets no second one. The ids `bos` are
    put before each document that does not begin with them, and count if the first passage does.
    Where one of `together` consecutive documents is left out, all of them are.

    Returns:
      The ids, and the number of documents without text.
    """
    start, end = (np.array(ids, np.int32) for ids in (bos, [] if eod is None else [eod]))
    mark = "" if eod is None else tokenizer.mark_of(eod)
    samples: list[tuple[np.ndarray, np.ndarray]] = []  # ids, and which count; empty if left out
    empty = 0
    for passages, encoded in zip(documents, tokenizer.encode(documents)):
        empty += not len(encoded.ids)
        text = passages[-1][0] if passages else ""
        first, last = (passages[at][1] for at in (0, -1)) if passages else (False, False)
        has_start = np.array_equal(encoded.ids[: len(start)], start)
        has_end = mark and text.rstrip().endswith(mark)
        parts = [start[: 0 if has_start else None], encoded.ids, end[: 0 if has_end else None]]
        is_learned = len(encoded.ids) and (encoded.counted.any() or (last and len(parts[2])))
        counts = np.full(len(parts[0]), first), encoded.counted, np.full(len(parts[2]), last)
        kept = slice(None if is_learned else 0)
        samples.append((np.concatenate(parts)[kept], np.concatenate(counts)[kept]))
    groups = (samples[at : at + together] for at in range(0, len(samples), together))
    complete = [sample for group in groups if all(len(ids) for ids, _ in group) for sample in group]
    if not complete:
        return DocumentBatch(np.zeros(0, np.int32), np.zeros(0, int), np.zeros(0, bool)), empty
    ids, counted = (np.concatenate(arrays) for arrays in zip(*complete))
    return DocumentBatch(ids, np.array([len(ids) for ids, _ in complete]), counted), empty


_loaded = lru_cache(maxsize=1)(load_tokenizer)  # a worker loads its tokenizer once


def group_documents(documents: Iterable[Passages], together: int = 1) -> Iterator[list[Passages]]:
    """Yield groups of documents, each large enough for one call of the tokenizer.

    `together` consecutive documents are in one group.
    """
    group, characters = [], 0
    for passages in documents:
        group.append(passages)
        characters += sum(len(text) for text, _ in passages)
        is_full = characters >= _BATCH or len(group) >= _BATCH // 256
        if is_full and len(group) % together == 0:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _print_sentence(console: Console, sentence: str) -> None:
    console.print(escape(sentence), highlight=False, soft_wrap=True)


def _join_files(files: list[Path]) -> str:
    """Join the first five files, and the number of further ones, into a string."""
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return ", ".join(map(str, files[:5])) + more


def _piece_key(
    piece: InputPiece,
    options: PrepareOptions,
    entry: TokenizerEntry,
    template: ChatTemplate | None,
    digest: str,
) -> str:
    """Return a digest of what a shard depends on: inputs with mtimes, options and tokenizer.

    `digest` is that of all of the tokenizer's files.
    """
    if template and not template.reads_date:
        template = msgspec.structs.replace(template, date="")
    files = [(part, Path(part.path).stat().st_mtime_ns) for part in piece.parts]
    known = [_FORM, files, options.field, options.ignored, entry, digest]
    known += [template] * bool(template) + ["pairs"] * options.pairs
    return hashlib.blake2b(msgspec.json.encode(known), digest_size=16).hexdigest()


def _build_manifest(
    done: list[PieceResult],
    entry: TokenizerEntry,
    origin: str,
    *,
    pairs: bool,
    date: str,
    end_of_turn: int | None,
) -> FolderManifest:
    shards = tuple(one.shard for one in done if one.shard)
    return FolderManifest(
        tokenizer=entry,
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        counted=sum(shard.counted for shard in shards),
        longest=max((one.longest for one in done), default=0),
        smallest_id=min((shard.smallest_id for shard in shards), default=0),
        largest_id=max((shard.largest_id for shard in shards), default=0),
        histogram=merge_histograms([one.histogram for one in done]),
        empty=sum(one.empty for one in done),
        bad_lines=sum(one.bad for one in done),
        unlearned=sum(one.unlearned for one in done),
        origin=origin,
        pairs=pairs,
        date=date,
        chats=sum(one.chats for one in done),
        end_of_turn=end_of_turn,
        shards=shards,
    )
