"""Paths given by the user: of a disk, or addresses of an object store such as gs://bucket/run."""

import re
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path

from jaxpipe.config.errors import ConfigError, first_line
from jaxpipe.config.secrets import MASK, has_mask

CHECKPOINT_STORES = ("gs", "s3")  # to which TensorStore writes arrays
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}


def examples() -> Path:
    """The folder of the example configurations: that of a checkout, or that of the package."""
    here = Path("configs")
    return here if (here / "quickstart.toml").exists() else Path(__file__).parents[1] / "examples"


def is_address(text: object) -> bool:
    """Whether a path is an address `scheme://...`.

    >>> is_address("gs://bucket/run"), is_address("runs/a")
    (True, False)
    """
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)))


def check_local(name: str, text: str) -> None:
    """Raise `ConfigError` if the path of a setting is an address or has a null character.

    >>> check_local("run.dir", "runs/a")
    """
    if sentence := _local_fault(text):
        raise ConfigError(f"{name}={text!r} {sentence}.")


def check_path(name: str, text: str, schemes: Iterable[str] | None = None) -> None:
    """Raise `ConfigError` if the path of a setting is an address that cannot be used.

    Args:
      name: of the setting.
      text: the path.
      schemes: that an address may have; None: any that fsspec knows.

    >>> check_path("run.dir", "runs/a")
    """
    if sentence := _fault(text, schemes):
        raise ConfigError(f"{name}={text!r} {sentence}.")


def local_path(text: str) -> Path:
    """A local path from the command line, for argparse.

    Raises:
      argparse.ArgumentTypeError: it is an address.
    """
    if sentence := _local_fault(text):
        raise ArgumentTypeError(f"{text!r} {sentence}")
    return Path(text)


def any_path(text: str) -> str:
    """A path or an address from the command line, for argparse.

    Raises:
      argparse.ArgumentTypeError: nothing can read the address.
    """
    if sentence := _fault(text, None):
        raise ArgumentTypeError(f"{text!r} {sentence}")
    return text


def _local_fault(text: str) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        return "is a URL, but this is read and written on a disk only: give a path on this machine"
    return _text_fault(text)


def _fault(text: str, schemes: Iterable[str] | None) -> str:
    """What is wrong with a path that may be an address; "" if nothing is."""
    if fault := _text_fault(text):
        return fault
    if not is_address(text):
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
            return "is no path and no address, which begins like gs:// or s3://: correct it"
        return ""
    if has_mask(text):
        return f"has {MASK} where a run that keeps the address leaves out a secret: give the secret"
    scheme, _, rest = text.partition("://")
    if schemes is not None and scheme not in schemes:
        listed = " or ".join(f"{one}://" for one in schemes)
        return f"begins with {scheme}://, but what holds checkpoints begins with {listed}, or is "\
            "a path on this machine: give one of these"  # fmt: skip
    if not rest.strip("/"):
        return f"names no bucket: give it as {scheme}://BUCKET/FOLDER"
    return _missing_package(scheme)


def _missing_package(scheme: str) -> str:
    """What fsspec lacks to read addresses of this scheme; "" if nothing."""
    import fsspec  # slow, and needed for addresses only

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        return (
            f"begins with {scheme}://, which fsspec does not know: use gs://, s3://, or a path on "
            f"this machine"
        )
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        remedy = f"pip install {package}" if package else first_line(error)
        return f"needs a package that is not installed: {remedy}"
    return ""


def _text_fault(text: str) -> str:
    if "\0" in text:
        return "has a null character, which no path has: leave it out"
    if re.search("[\ud800-\udfff]", text):  # Python's stand-ins for such bytes of a command line
        return "has bytes that are no UTF-8, as files of a run are: rename it"
    return ""
