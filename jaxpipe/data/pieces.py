"""Divide input files into pieces; a piece becomes one shard and is the unit of crash recovery."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.data.optional import import_optional
from jaxpipe.data.readers import FilePart, file_kind, is_compressed


class InputPiece(msgspec.Struct, frozen=True):
    """Parts of input files that become one shard, named by `number`."""

    number: int
    parts: tuple[FilePart, ...]

    @property
    def size(self) -> int:
        """Bytes of the inputs on disk."""
        return sum(part.size for part in self.parts)


class InputFiles(NamedTuple):
    """Input files to read, and files of the same folders that are left out."""

    files: list[Path]
    left_out: list[Path]


def list_input_files(paths: Iterable[Path], output: Path | None = None) -> InputFiles:
    """List the given files and all files below the given folders, sorted by name.

    Hidden files, Python's caches and files below `output` are skipped. Where a folder has JSON or
    Parquet files, its other files (a README, a license) are left out. Raises `ConfigError` where
    there is no file.
    """
    files: list[Path] = []
    beside: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"the input {path} does not exist: correct its path.")
        if not path.is_dir():
            files.append(path)
            continue
        listed = []
        for file in sorted(path.rglob("*")):
            parts = file.relative_to(path).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            written = output is not None and output.absolute() in file.absolute().parents
            if file.is_file() and not hidden and not written:
                listed.append(file)
        records = [file for file in listed if file_kind(file) != "text"]
        files += records or listed
        beside += [file for file in listed if records and file_kind(file) == "text"]
    if not files:
        raise ConfigError(f"there is no file in {', '.join(map(str, paths))}: give other inputs.")
    named = {*files}
    return InputFiles(files, [file for file in beside if file not in named])


def divide_files(files: Iterable[Path], size: int) -> list[InputPiece]:
    """Divide files into pieces of about `size` bytes on disk; indivisible files may exceed it."""
    pieces: list[tuple[FilePart, ...]] = []
    parts_of_piece: list[FilePart] = []
    piece_bytes = 0
    for part in (part for file in files for part in _divide_file(file, size)):
        parts_of_piece.append(part)
        piece_bytes += part.size
        if piece_bytes >= size:
            pieces.append(tuple(parts_of_piece))
            parts_of_piece, piece_bytes = [], 0
    if parts_of_piece:
        pieces.append(tuple(parts_of_piece))
    return [InputPiece(number, parts) for number, parts in enumerate(pieces)]


def _divide_file(file: Path, size: int) -> Iterator[FilePart]:
    """Yield parts of about `size` bytes where the file can be divided, else the whole file."""
    whole = file.stat().st_size
    if file_kind(file) == "rows":
        yield from _count_row_groups(file)
    elif file_kind(file) == "lines" and not is_compressed(file):
        for begin in range(0, whole, size):
            end = min(begin + size, whole)
            yield FilePart(str(file), begin, end, end - begin)
    else:
        yield FilePart(str(file), 0, whole, whole)


def _count_row_groups(file: Path) -> Iterator[FilePart]:
    parquet = import_optional("pyarrow.parquet", f"reading {file}")
    try:
        metadata = parquet.read_metadata(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no Parquet file, or is truncated: fetch it again.") from error
    for group in range(metadata.num_row_groups):
        yield FilePart(str(file), group, group + 1, metadata.row_group(group).total_byte_size)
