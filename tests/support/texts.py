"""Inputs of a few documents, prepared and read back."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard
from rich.console import Console

from jaxpipe.data.prepare.preparation import PrepareOptions, prepare
from jaxpipe.data.shards.manifest import FolderManifest
from jaxpipe.data.shards.token_files import open_documents

TEXTS = ["one", "zwei drei\n", "", "четыре", "five " * 40]


def prepared(inputs: list[Path], folder: Path, **options: Any) -> FolderManifest:
    options = {"tokenizer": "bytes"} | options
    quiet = Console(quiet=True)
    return prepare(inputs, folder, PrepareOptions(**options), processes=2, console=quiet)


def decoded(folder: Path) -> list[str]:
    """Return the documents of a folder, without the NUL at their end."""
    documents = open_documents(str(folder), 256)
    texts = [documents.tokens(i).astype("u1").tobytes() for i in range(len(documents.lengths))]
    assert all(text.endswith(b"\0") for text in texts)
    return [text[:-1].decode() for text in texts]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_texts(path: Path, texts: list[str], name: str) -> Path:
    """Write the texts to a file whose kind follows from its name."""
    content = lines([{"text": text, "other": 1} for text in texts])
    match path.with_name(name).suffix:
        case ".parquet":
            table = pyarrow.table({"id": range(len(texts)), "text": texts})
            pyarrow.parquet.write_table(table, path.with_name(name), row_group_size=2)
            return path.with_name(name)
        case ".gz":
            content = gzip.compress(content)
        case ".zst":  # two frames, as parallel compressors write them
            half = len(content) // 2
            content = b"".join(map(zstandard.compress, (content[:half], content[half:])))
    path.with_name(name).write_bytes(content)
    return path.with_name(name)


NAMES = ["a.jsonl", "a.json.gz", "a.jsonl.zst", "a.parquet"]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
