"""The output of `inspect`: a table of counts, a length histogram and the first documents."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxpipe.data.prepare.tokenizing import load_tokenizer
from jaxpipe.data.shards.manifest import FolderManifest, read_manifest
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.tokenizer.files import BYTES

_BAR = 40  # characters of the longest bar
_SHOWN = 400  # characters shown of a document
_MARKS = "⟦⟧"  # around text that counts in the loss, where some does not


def describe_folder(folder: Path, documents: int) -> Iterator[RenderableType]:
    """Yield the table, the histogram and the first documents of a prepared folder.

    Raises `ConfigError` where the folder was not prepared, or not completely.
    """
    manifest = read_manifest(folder)
    yield _build_table(manifest)
    yield _build_histogram(manifest)
    first = manifest.shards[0]
    opened = open_documents(str(folder / f"{first.name}.bin"), manifest.largest_id + 1)
    tokenizer = load_tokenizer(BYTES if manifest.tokenizer.digest == BYTES else str(folder))
    for number in range(min(documents, first.documents)):
        ids, counted = opened.tokens(number), opened.counted(number)
        counts = np.ones(len(ids), bool) if counted is None else counted
        marked = counts.any() and not counts.all()
        share = "all" if counts.all() else f"{counts.sum():,}"
        where = f", those between {_MARKS[0]} and {_MARKS[1]}" if marked else ""
        title = f"\ndocument {number}, {len(ids):,} tokens, {share} count in the loss{where}"
        yield Text(title, style="bold")
        text, characters = Text(), _SHOWN
        for begin, end, learned in _split_runs(counts):
            passage = tokenizer.decode(ids[begin:end][:characters])[:characters]
            if learned and marked and passage:
                passage = passage.join(_MARKS)
            text.append(passage, style="" if learned else "dim")
            characters = max(characters - len(passage), 0)
        yield text


def _split_runs(flags: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return begin, end and value of each run of equal flags."""
    borders = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(a, b, bool(flags[a])) for a, b in pairwise(borders)]


def _build_table(manifest: FolderManifest) -> Table:
    table = Table(show_header=False)
    tokenizer, mean = manifest.tokenizer, manifest.tokens / manifest.documents
    eod = "none" if tokenizer.eod is None else f"{tokenizer.eod}"
    rows = {
        "documents": f"{manifest.documents:,}",
        "tokens": f"{manifest.tokens:,}",
        "that count in the loss": f"{manifest.counted:,}",
        "tokens of a document": f"{mean:,.1f} on average, {manifest.longest:,} at most",
        "ids": f"{manifest.smallest_id}..{manifest.largest_id}",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} ids",
        "ids at the start of a document": ", ".join(map(str, tokenizer.bos)) or "none",
        "id at the end of a document": eod,
        "left out": f"{manifest.empty:,} without text, {manifest.unlearned:,} in which nothing "
        f"counts, {manifest.bad_lines:,} that cannot be read",
        "shards": f"{len(manifest.shards):,}",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _build_histogram(manifest: FolderManifest) -> Table:
    """Return the number of documents by length, in powers of 2."""
    counts: dict[int, int] = {}
    for bar in manifest.histogram:
        power = 1 << (bar.up_to - 1).bit_length()
        counts[power] = counts.get(power, 0) + bar.documents
    table = Table("tokens, up to", "documents", "")
    for power, count in counts.items():
        table.add_row(f"{power:,}", f"{count:,}", "#" * -(-_BAR * count // max(counts.values())))
    return table
