"""Which files are prepared: compressed ones, those of a folder, and none that are no text."""

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from texts import decoded, lines, prepared

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.input_pieces import list_input_files

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
}


def test_hidden_files_and_caches_of_python_are_skipped(tmp_path):
    """A folder of sources has caches as soon as Python has imported it."""
    for name in ("a.py", "b/c.py", ".git/x", "b/.y", "__pycache__/a.pyc", "b/__pycache__/c.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x")
    found = list_input_files([tmp_path]).files
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "b/c.py"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_compressed_files_are_read(tmp_path: Path, name: str, suffix: str) -> None:
    """Also in several frames, as parallel compressors write them; and not half of them."""
    pack = PACK[suffix]
    texts = ["one", "zwei\n", "x" * 3_000_000]
    content = {
        "a.jsonl": lines([{"text": text} for text in texts]),
        "a.json": b"[" + b",".join(lines([text]).strip() for text in texts) + b"]",
        "a.csv": b"text\n" + b"".join(b'"%s"\n' % text.encode() for text in texts),
        "a.txt": "".join(texts).encode(),
    }[name]
    path = tmp_path / (name + suffix)
    halves = [content] if suffix == ".lzma" else [content[:9], content[9:]]
    path.write_bytes(b"".join(map(pack, halves)))
    prepared([path], tmp_path / "out")
    assert decoded(tmp_path / "out") == (["".join(texts)] if name == "a.txt" else texts)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(
        ConfigError, match=rf"{name}\{suffix} is truncated or damaged \(.+\): fetch"
    ):
        prepared([path], tmp_path / "none")


def archive() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return made.getvalue()


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("a.txt", "text")
    return made.getvalue()


def parquet() -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), made)
    return made.getvalue()


def array() -> bytes:
    made = io.BytesIO()
    np.save(made, np.arange(3))
    return made.getvalue()


BINARY = {
    "a.tar": (archive(), "a tar archive"),
    "b": (archive(), "a tar archive"),
    "a.tar.gz": (gzip.compress(archive()), "a tar archive"),
    "a.tgz": (gzip.compress(archive()), "compressed by gzip, but is not named .gz"),
    "a.jsonl": (gzip.compress(b"{}"), "compressed by gzip"),
    "a.csv": (bz2.compress(b"text\na"), "compressed by bzip2"),
    "a.docx": (zipped(), "a zip archive"),
    "a.json": (zipped(), "a zip archive"),
    "a.pdf": (b"%PDF-1.7\n1 0 obj\n", "a PDF"),
    "a.warc": (b"WARC/1.0\r\nWARC-Type: response\r\n\r\n<p>text", "WARC, pages of the web"),
    "a.warc.gz": (
        gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion\r\n"),
        "WARC, pages of the web",
    ),
    "a.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "an image"),
    "a.jpg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "an image"),
    "a.wav": (b"RIFF\x24\0\0\0WAVEfmt ", "a sound or a film"),
    "a.pkl": (pickle.dumps(["a"], protocol=0), "a pickle"),
    "a.data": (pickle.dumps(["a"]), "a pickle"),
    "a.pq": (parquet(), "Parquet, but is not named .parquet"),
    "a.npy": (array(), "token ids"),
    "a.ids": (array(), "token ids"),
    "a.bin": (b"text", "token ids"),
    "a.so": (b"\x7fELF\x02\x01\x01\0", "a program"),
    "a.txt": ("text".encode("utf-16"), "UTF-16 text"),
    "c.jsonl": ('{"text": "a"}'.encode("utf-16"), "UTF-16 text"),
    "a.db": (b"SQLite format 3\0", "a database of SQLite"),
    "a.dat": (b"text and \0 more", "binary data, with NUL bytes"),
    "b.txt": (b"x" * 5000 + b"\0", "binary data"),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", BINARY)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, name: str) -> None:
    content, kind = BINARY[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}.* it is {kind}.*take it out of the inputs"):
        prepared([tmp_path / name], tmp_path / "out")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("text", ["ORCHESTRA", "GGUF is a format", "MZ", "PAR1", "BZh", "", "é"])
def test_texts_that_begin_like_other_files_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text + " and more")
    prepared([tmp_path / "a.txt"], tmp_path / "out")
    assert decoded(tmp_path / "out") == [text + " and more"]
