"""Divide input files into pieces; a piece becomes one shard and is the unit of crash recovery."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.input_files import FilePart
from jaxpipe.data.prepare.readers import find_format
from jaxpipe.data.splits import check_one_split


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


# Files that `datasets` writes beside its data, and the key that shows that it did.
_DESCRIPTIONS = {
    "dataset_info.json": "", "dataset_infos.json": "", "dataset_dict.json": "splits",
    "state.json": "_data_files",
}  # fmt: skip


def list_input_files(paths: Iterable[Path], output: Path | None = None) -> InputFiles:
    """List the given files and all files below the given folders, sorted by name.

    Hidden files, Python's caches and files below `output` are skipped. Where a folder has files of
    records, its other files (a README, a license, what `datasets` writes beside its data) are left
    out. Arrow files that a `state.json` of `datasets` lists are in its order.

    Raises `ConfigError` where there is no file, one of `datasets` is missing, or a folder has
    records to train on and records of other splits.
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
        found = _choose_records(listed)
        check_one_split(path, found.files)
        files += found.files or listed
        beside += found.left_out if found.files else []
    if not files:
        raise ConfigError(f"there is no file in {', '.join(map(str, paths))}: give other inputs.")
    named = {*files}
    return InputFiles(files, [file for file in beside if file not in named])


def _choose_records(listed: list[Path]) -> InputFiles:
    """Return the files of records among those of a folder, and the others."""
    described = [file for file in listed if _describes_dataset(file)]
    chosen = {file for file in listed if find_format(file).locate} - {*described}
    chosen -= {file for file in chosen if re.match(r"cache-.*\.arrow$", file.name)}
    ranks: dict[Path, int] = {}
    for state in (file for file in described if file.name == "state.json"):
        own = _read_state(state)
        ranks |= {file: number for number, file in enumerate(own)}
        chosen -= {file for file in state.parent.glob("*.arrow") if file not in own}
    files = sorted(chosen, key=lambda file: (file.parent, ranks.get(file, 0), file))
    if not ranks:
        files = [file for file in listed if file in chosen]
    return InputFiles(files, [file for file in listed if file not in chosen])


def _describes_dataset(file: Path) -> bool:
    """Whether a file is one that `datasets` writes beside its data."""
    if file.name not in _DESCRIPTIONS:
        return False
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(content, dict) and _DESCRIPTIONS[file.name] in {"", *content}


def _read_state(state: Path) -> list[Path]:
    """Return the Arrow files that a `state.json` of `datasets` lists."""
    content = msgspec.json.decode(state.read_bytes())
    if content.get("_indices_data_files"):
        raise ConfigError(
            f"{state} chooses rows by _indices_data_files, which is not read: write the folder "
            f"again by flatten_indices() and save_to_disk() of `datasets`."
        )
    files = [state.parent / str(one.get("filename")) for one in content["_data_files"]]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"{missing[0]}, which {state} lists, is missing: copy it there.")
    return files


def divide_files(files: Iterable[Path], size: int) -> list[InputPiece]:
    """Divide files into pieces of about `size` bytes on disk; indivisible files may exceed it."""
    pieces: list[tuple[FilePart, ...]] = []
    parts_of_piece: list[FilePart] = []
    piece_bytes = 0
    for part in (part for file in files for part in find_format(file).divide(file, size)):
        parts_of_piece.append(part)
        piece_bytes += part.size
        if piece_bytes >= size:
            pieces.append(tuple(parts_of_piece))
            parts_of_piece, piece_bytes = [], 0
    if parts_of_piece:
        pieces.append(tuple(parts_of_piece))
    return [InputPiece(number, parts) for number, parts in enumerate(pieces)]
