"""The GPUs that a step can be compiled for without having one. Imports no jax."""

import re
from argparse import ArgumentTypeError
from importlib.resources import files

CARDS = ("h100", "h200", "b200", "a100")
PER_HOST = 8
_MEMORY = re.compile(r"(device_memory_size: )(\d+)")
_MAJOR = re.compile(r"major: (\d+)")
_WITH_COSTS = 9  # the first with a table of products' rates in XLA (jax 0.12.0)
_BANDWIDTH = re.compile(r"memory_bandwidth: (\d+)")


def named(text: str) -> list[str]:
    """The cards of a list with commas; raises `argparse.ArgumentTypeError` for any other.

    >>> named("h100,b200")
    ['h100', 'b200']
    """
    for card in text.split(","):
        if card not in CARDS:
            raise ArgumentTypeError(f"{card!r} is none of {', '.join(CARDS)}")
    return text.split(",")


def target_config(card: str) -> str:
    """XLA's text proto of a card."""
    return files("jaxpipe.gpu").joinpath(f"{card}.txtpb").read_text()


def memory_of(card: str) -> int:
    """Bytes of a card's memory."""
    return int(_MEMORY.search(target_config(card))[2])


def bandwidth_of(card: str) -> int:
    """Bytes a second of a card's memory."""
    return int(_BANDWIDTH.search(target_config(card))[1])


def has_costs(card: str) -> bool:
    """Whether XLA's cost model knows a card; compiling for others with it fails."""
    return int(_MAJOR.search(target_config(card))[1]) >= _WITH_COSTS


def with_usable(config: str, usable: float) -> str:
    """A target configuration under which XLA schedules for so many usable bytes.

    In a run XLA's limit is what jax has taken; without a device it is 80 % of the memory.
    """
    return _MEMORY.sub(lambda match: f"{match[1]}{int(usable / 0.8)}", config)


def topology(count: int) -> str:
    """Slices x hosts x GPUs a host, with as many of at most 8 a host as divide the count.

    >>> topology(4), topology(32), topology(12)
    ('1x1x4', '1x4x8', '1x2x6')
    """
    per_host = max(n for n in range(1, PER_HOST + 1) if count % n == 0)
    return f"1x{count // per_host}x{per_host}"
