"""Paths given by the user. They must be local: object stores are not supported."""

import re
from argparse import ArgumentTypeError
from pathlib import Path

from jaxpipe.config.errors import ConfigError


def check_local(name: str, text: str) -> None:
    """Raise `ConfigError` if the path of a setting is a URL such as gs://bucket/run.

    >>> check_local("run.dir", "runs/a")
    """
    if sentence := _fault(text):
        raise ConfigError(f"{name}={text!r} {sentence}.")


def local_path(text: str) -> Path:
    """A path from the command line, for argparse.

    Raises:
      argparse.ArgumentTypeError: it is a URL.
    """
    if sentence := _fault(text):
        raise ArgumentTypeError(f"{text!r} {sentence}")
    return Path(text)


def _fault(text: str) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        return (
            "is a URL, but only local paths can be read and written: give a path on this machine, "
            "such as one where the store is mounted, or copy the files"
        )
    return "has a null character, which no path has: leave it out" if "\0" in text else ""
