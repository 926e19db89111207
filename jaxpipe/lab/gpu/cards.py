"""The GPUs that a step can be compiled for without a device. This module imports no jax."""

import re
from argparse import ArgumentTypeError
from importlib.resources import files

CARDS = ("h100", "h200", "b200", "a100")
PER_HOST = 8
_MEMORY = re.compile(r"(device_memory_size: )(\d+)")
_CAPABILITY = re.compile(r"major: (\d+)(?:\s+minor: (\d+))?")
# First compute capability for which XLA's cost model has rates of matrix products (jax 0.12.0).
_WITH_COSTS = 9
_BANDWIDTH = re.compile(r"memory_bandwidth: (\d+)")


def parse_cards(text: str) -> list[str]:
    """Parse a comma-separated list of cards; raise `ArgumentTypeError` for an unknown card.

    >>> parse_cards("h100,b200")
    ['h100', 'b200']
    """
    for card in text.split(","):
        if card not in CARDS:
            raise ArgumentTypeError(f"{card!r} is none of {', '.join(CARDS)}")
    return text.split(",")


def target_config(card: str) -> str:
    """Return XLA's target configuration of a card, a text proto."""
    return files("jaxpipe.lab.gpu").joinpath(f"{card}.txtpb").read_text()


def card_bandwidth(card: str) -> int:
    """Return a card's memory bandwidth in bytes/s."""
    return int(_BANDWIDTH.search(target_config(card))[1])


def card_capability(card: str) -> float:
    """Return a card's compute capability, 9.0 for an H100."""
    return float(".".join(_CAPABILITY.search(target_config(card)).groups("0")))


def has_costs(card: str) -> bool:
    """Whether XLA's cost model knows a card; compiling with it for other cards fails."""
    return card_capability(card) >= _WITH_COSTS


def set_usable_memory(config: str, usable: float) -> str:
    """Return a target configuration that makes XLA schedule for `usable` bytes of memory.

    In a run XLA's limit is the memory that jax has reserved; without a device it is 80 % of
    `device_memory_size`.
    """
    return _MEMORY.sub(lambda match: f"{match[1]}{int(usable / 0.8)}", config)


def topology(count: int) -> str:
    """Return slices x hosts x GPUs per host; GPUs per host is the largest divisor up to 8.

    >>> topology(4), topology(32), topology(12)
    ('1x1x4', '1x4x8', '1x2x6')
    """
    per_host = max(n for n in range(1, PER_HOST + 1) if count % n == 0)
    return f"1x{count // per_host}x{per_host}"
