"""Schedules of `ORDERS`, for tests of the core: by name, and near any sizes."""

from inspect import signature

from jaxpipe.core.schedule import ORDERS

ROUNDS = ("interleaved_1f1b", "interleaved_zb")  # divide microbatches into rounds of equal length


def has_option(name, option):
    """Return whether an order has an option, such as `slices` or `virtual_stages`."""
    return option in signature(ORDERS[name]).parameters


def build(name, *, pp, microbatches, **options):
    """Return the schedule of a name."""
    return ORDERS[name](pp, microbatches, **options)


def nearest_sizes(name, pp, microbatches):
    """Return the legal `(pp, microbatches)` of an order that are nearest to the given ones."""
    if name == "dualpipe":  # both are even
        pp, microbatches = pp + pp % 2, microbatches + microbatches % 2
    if name in ("dualpipe", "dualpipev"):
        microbatches = max(microbatches, 2 * pp)
    if name in ROUNDS:
        rounds = max(1, microbatches // pp)
        microbatches = microbatches // rounds * rounds
    return pp, microbatches


def min_microbatches(name, pp):
    """Return the fewest microbatches that an order allows on `pp` ranks."""
    return nearest_sizes(name, pp, 1)[1]


def near(name, pp, microbatches, virtual_stages=None, **options):
    """Return the schedule of the legal sizes nearest to the given ones."""
    pp, microbatches = nearest_sizes(name, pp, microbatches)
    if virtual_stages and has_option(name, "virtual_stages"):
        options["virtual_stages"] = virtual_stages
    return build(name, pp=pp, microbatches=microbatches, **options)
