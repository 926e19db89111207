"""Input files: their parts, their compression, and what a file of another kind holds."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional

_CHUNK = 1 << 20  # bytes read at a time
_HEAD = 4096  # bytes at the start of a file that show what it holds
_TOKEN_IDS = "token ids or other binary data, which data.path reads without being prepared"
# Suffixes of files whose content does not always show that they are no text.
_BINARY_SUFFIXES = {
    ".tar": "a tar archive", ".pkl": "a pickle", ".pickle": "a pickle", ".bin": _TOKEN_IDS,
    ".idx": _TOKEN_IDS, ".npy": _TOKEN_IDS, ".ds": _TOKEN_IDS, ".fast_llm_dataset": _TOKEN_IDS,
    ".mds": "a shard of MosaicML's streaming", ".tfrecord": "TFRecord",
}  # fmt: skip
# What a file that is no text begins with.
_MAGIC = (
    (rb"%PDF-", "a PDF"),
    (rb"WARC/", "WARC, pages of the web with their headers"),
    (rb"PK\x03\x04", "a zip archive, as .docx, .xlsx, .epub, .npz and .pt are, too"),
    (rb"(?s).{257}ustar", "a tar archive"),
    (rb"\x1f\x8b", "compressed by gzip, but is not named .gz"),
    (rb"BZh[1-9]1AY&SY", "compressed by bzip2, but is not named .bz2"),
    (rb"\xfd7zXZ\x00", "compressed by xz, but is not named .xz"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstandard, but is not named .zst"),
    (rb"\x04\x22\x4d\x18", "compressed by lz4, which is not read"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"Rar!\x1a", "a rar archive"),
    (rb"PAR1", "Parquet, but is not named .parquet"),
    (rb"ARROW1", "Arrow, but is not named .arrow"),
    (rb"FEA1", "Feather of version 1, which is not read"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text, which must be converted to UTF-8"),
    (rb"(?s)\xff{4}..[\x00-\x03]\x00", "Arrow, but is not named .arrow"),  # and a small length
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*|MM\x00\*", "an image"),
    (rb"RIFF....WAVE|ID3|OggS|fLaC|....ftyp", "a sound or a film"),
    (rb"\x93NUMPY|MMIDIDX|fast_llm_prepared_dataset", _TOKEN_IDS),
    (rb"\x89HDF", "HDF5"),
    (rb"SQLite format 3", "a database of SQLite"),
    (rb"\x80[\x02-\x05]", "a pickle"),
    (rb"Obj\x01", "Avro"),
    (rb"ORC", "ORC"),
    (rb"GGUF", "GGUF"),
    (rb"LITPKDS", "a packed file of LitGPT, which is not read"),
    (rb"\x7fELF|MZ", "a program"),
)


class FilePart(msgspec.Struct, frozen=True):
    """A range of an input file.

    `begin` and `end` count bytes of plain lines, row groups of Parquet or batches of Arrow, else
    the part is the full file.
    """

    path: str
    begin: int
    end: int  # exclusive
    size: int  # bytes on disk


Item = tuple[Callable[[], Any], int]  # a function that parses a record, and its bytes on disk


def whole_file(path: Path, size: int) -> Iterator[FilePart]:
    """Yield the only part of a file that cannot be divided."""
    whole = path.stat().st_size
    yield FilePart(str(path), 0, whole, whole)


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, so that it can only be read from its start."""
    return path.suffix.lower() in _UNPACK


def unpacked_suffix(path: Path) -> str:
    """Return a file's suffix in small letters, without that of its compression."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def describe_binary(path: Path, head: bytes) -> str:
    """Return what a file holds if that is no text, or "".

    Args:
      path: the file, whose suffix may show it.
      head: the beginning of its content, without compression.
    """
    if name := _BINARY_SUFFIXES.get(unpacked_suffix(path)):
        return name
    head = head[:_HEAD]
    if head.isascii() and b"\0" not in head and not head.startswith((b"%PDF-", b"WARC/")):
        return ""
    return find_magic(head) or ("binary data, with NUL bytes" if b"\0" in head else "")


def find_magic(head: bytes, least: int = 1) -> str:
    """Return what a file holds by its first bytes, of which at least `least` show it; else ""."""
    found = ((re.match(magic, head), name) for magic, name in _MAGIC)
    return next((name for match, name in found if match and len(match[0]) >= least), "")


def check_is_text(path: Path) -> None:
    """Raise `ConfigError` where the beginning of a file is no text."""
    head = next((chunk for chunk, _ in read_chunks(path)), b"")
    if name := describe_binary(path, head):
        raise ConfigError(
            f"{path} should be {unpacked_suffix(path)} by its name, but it is {name}: convert or "
            f"rename it, or take it out of the inputs."
        )


def read_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the uncompressed content of a file in chunks, with the bytes on disk of each.

    Raises `ConfigError` where a compressed file is truncated or damaged.
    """
    try:
        yield from _UNPACK.get(path.suffix.lower(), _plain_chunks)(path)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; those of gzip and bz2 have no number
        raise ConfigError(
            f"{path} is truncated or damaged ({first_line(error)}): fetch it again."
        ) from error


def _plain_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk, len(chunk)


def _python_chunks(unpack: Callable[[Any], Any]) -> Callable[[Path], Iterator[tuple[bytes, int]]]:
    """Return a reader of a compression that Python itself reads."""

    def chunks(path: Path) -> Iterator[tuple[bytes, int]]:
        with path.open("rb") as file, unpack(file) as unpacked:
            before = 0
            while chunk := unpacked.read(_CHUNK):
                yield chunk, file.tell() - before
                before = file.tell()

    return chunks


def _zst_chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    zstandard = import_optional("zstandard", f"reading {path}")
    decompressor, frame = zstandard.ZstdDecompressor(), None
    with path.open("rb") as file:
        while compressed := file.read(_CHUNK):
            size = len(compressed)
            while compressed:  # a chunk may have the end of one frame and the start of others
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(compressed), size
                except zstandard.ZstdError as error:
                    raise EOFError(error) from error
                compressed, size, frame = frame.unused_data, 0, None if frame.eof else frame
    if frame:
        raise EOFError("it ends within a frame")


_UNPACK = {
    ".gz": _python_chunks(lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": _python_chunks(bz2.BZ2File),
    ".xz": _python_chunks(lzma.LZMAFile),
    ".lzma": _python_chunks(lzma.LZMAFile),
    ".zst": _zst_chunks,
    ".zstd": _zst_chunks,
}
