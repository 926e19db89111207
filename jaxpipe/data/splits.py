"""Splits of a folder, by the names of its files and folders, as `datasets` tells them apart.

Source: datasets, `data_files.py`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from jaxpipe.config import ConfigError

_SPLIT = re.compile(
    r"(?<![a-z])(?:(training|train)|(validation|valid|val|dev|evaluation|eval|testing|test))"
    r"(?![a-z])"
)


def check_one_split(folder: Path, files: Iterable[Path]) -> None:
    """Raise `ConfigError` where the names of all files are of splits, some to train on, some not.

    >>> check_one_split(Path("a"), [Path("a/train.jsonl"), Path("a/train/x.jsonl")])
    """
    first: dict[bool, Path] = {}
    for file in files:
        found = _SPLIT.search(file.relative_to(folder).as_posix().lower())
        if found is None:
            return
        first.setdefault(found[1] is not None, file)
    if len(first) == 2:
        raise ConfigError(
            f"{folder} holds several splits, as {first[True].relative_to(folder)} and "
            f"{first[False].relative_to(folder)}: name the files to train on, or the folder of one "
            f"split."
        )
