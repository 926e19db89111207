"""A schedule of any family near any sizes, built quickly: the search itself is not tested."""

from jaxpipe.schedules import FAMILIES, build

QUICK = 20_000  # steps that a search simulates; the default is many times as many


def nearest_sizes(name, pp, microbatches):
    """Return the legal `(pp, microbatches)` of a family that are nearest to the given ones."""
    if name == "dualpipe":  # both are even
        pp, microbatches = pp + pp % 2, microbatches + microbatches % 2
    if name in ("dualpipe", "dualpipev"):
        microbatches = max(microbatches, 2 * pp)
    if FAMILIES[name].needs_equal_rounds:
        rounds = max(1, microbatches // pp)
        microbatches = microbatches // rounds * rounds
    return pp, microbatches


def min_microbatches(name, pp):
    """Return the fewest microbatches that a family allows on `pp` ranks."""
    return nearest_sizes(name, pp, 1)[1]


def near(name, pp, microbatches, virtual_stages=None, **options):
    """Return the schedule of the legal sizes nearest to the given ones."""
    family = FAMILIES[name]
    pp, microbatches = nearest_sizes(name, pp, microbatches)
    if family.is_searched:
        options["effort"] = QUICK
    if family.has_option("virtual_stages"):
        options["virtual_stages"] = virtual_stages
    return build(name, pp=pp, microbatches=microbatches, **options)
