"""Settings as words of a command line, for what a plan or a search recommends."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpipe.config import Config


def words_of(changes: Mapping[str, Any]) -> str:
    """Settings by name as words of a command line.

    >>> words_of({"parallel.layer_split": (3, 1), "parallel.schedule_file": ""})
    "parallel.layer_split=[3,1] parallel.schedule_file=''"
    """
    return " ".join(f"{name}={_as_toml(value)}" for name, value in changes.items())


def changed(before: Config, after: Config, names: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The settings in which two configurations differ, by name, with the values of `after`.

    Args:
      before: what a user has.
      after: what is recommended.
      names: settings to compare, by section.
    """
    return {
        f"{section}.{key}": now
        for section, keys in names.items()
        for key in keys
        if (now := getattr(getattr(after, section), key)) != getattr(getattr(before, section), key)
    }


def _as_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"
