"""A schedule of any family near any sizes, built quickly: the search itself is not tested."""

from jaxpipe.schedule import FAMILIES, build

QUICK = 20_000  # steps that a search simulates; the default is many times as many


def near(name, pp, microbatches, virtual_stages=None, **options):
    """Return the schedule of the legal sizes nearest to the given ones."""
    family = FAMILIES[name]
    pp, microbatches = family.nearest_sizes(pp, microbatches)
    if family.is_searched:
        options["effort"] = QUICK
    if family.has_option("virtual_stages"):
        options["virtual_stages"] = virtual_stages
    return build(name, pp=pp, microbatches=microbatches, **options)
