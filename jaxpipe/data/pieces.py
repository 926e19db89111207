"""Inputs cut into pieces, each of which becomes a shard: what is done again after a crash."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.data.optional import needed
from jaxpipe.data.readers import Part, is_compressed, kind


class Piece(msgspec.Struct, frozen=True):
    """Parts of inputs that become the shard of a number."""

    number: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)


class Inputs(NamedTuple):
    """Files to read, and those in the same folders that are not."""

    files: list[Path]
    left_out: list[Path]


def input_files(paths: Iterable[Path], output: Path | None = None) -> Inputs:
    """The files, and those in the folders: all whose name has no dot in front, by their names.

    Beside JSON or Parquet in a folder the files of other kinds (a README, a license) are no data:
    they are left out. What is below the output, if one is given, is no input. Raises `ConfigError`
    where there are none.
    """
    files: list[Path] = []
    beside: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"the input {path} does not exist: correct its path.")
        if not path.is_dir():
            files.append(path)
            continue
        found = []
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            written = output is not None and output.absolute() in file.absolute().parents
            if file.is_file() and not hidden and not written:
                found.append(file)
        records = [file for file in found if kind(file) != "text"]
        files += records or found
        beside += [file for file in found if records and kind(file) == "text"]
    if not files:
        raise ConfigError(f"there is no file in {', '.join(map(str, paths))}: give other inputs.")
    named = {*files}
    return Inputs(files, [file for file in beside if file not in named])


def cut(files: Iterable[Path], size: int) -> list[Piece]:
    """Pieces of about so many bytes on disk; files that cannot be cut may make larger ones."""
    pieces: list[tuple[Part, ...]] = []
    taken: list[Part] = []
    bytes_taken = 0
    for part in (part for file in files for part in _parts(file, size)):
        taken.append(part)
        bytes_taken += part.size
        if bytes_taken >= size:
            pieces.append(tuple(taken))
            taken, bytes_taken = [], 0
    if taken:
        pieces.append(tuple(taken))
    return [Piece(number, parts) for number, parts in enumerate(pieces)]


def _parts(file: Path, size: int) -> Iterator[Part]:
    """A file in parts of about so many bytes, if it can be cut."""
    whole = file.stat().st_size
    if kind(file) == "rows":
        yield from _row_groups(file)
    elif kind(file) == "lines" and not is_compressed(file):
        for begin in range(0, whole, size):
            end = min(begin + size, whole)
            yield Part(str(file), begin, end, end - begin)
    else:
        yield Part(str(file), 0, whole, whole)


def _row_groups(file: Path) -> Iterator[Part]:
    parquet = needed("pyarrow.parquet", f"reading {file}")
    try:
        metadata = parquet.read_metadata(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no Parquet file, or is truncated: fetch it again.") from error
    for group in range(metadata.num_row_groups):
        yield Part(str(file), group, group + 1, metadata.row_group(group).total_byte_size)
