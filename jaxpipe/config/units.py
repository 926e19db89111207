"""Sizes in bytes, as commands read and print them."""

import re
from argparse import ArgumentTypeError

_LEAST_ALONE = 1 << 20  # bytes; fewer are given without a unit by mistake
_POWERS = {unit: power for power, unit in enumerate(("", "k", "m", "g", "t"))}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `80GiB`, `50GB` or `1e9`.

    Raises:
      argparse.ArgumentTypeError: the text is not a size, or a small number without a unit.

    >>> parse_bytes("80GiB"), parse_bytes("50 GB"), parse_bytes("1e9")
    (85899345920, 50000000000, 1000000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if not match or not float(match[1]):
        raise ArgumentTypeError(f"{text!r} is not a size such as 80GiB or 50GB")
    if match[0].isdecimal() and int(match[0]) < _LEAST_ALONE:
        raise ArgumentTypeError(f"{text!r} has no unit: write 80GiB or 50GB, or 80B for bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])


def readable_bytes(count: float) -> str:
    """A size in binary units, as text.

    >>> readable_bytes(1536), readable_bytes(80e9)
    ('1.5 KiB', '74.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
