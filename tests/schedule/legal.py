"""A schedule of any family near any sizes, built quickly: what is tested is not the search."""

from jaxpipe.schedule import FAMILIES, build

QUICK = 20_000  # steps that a search simulates: by default many times as many


def near(name, pp, microbatches, virtual_stages=None, **options):
    """The schedule of the legal sizes nearest to these."""
    family = FAMILIES[name]
    pp, microbatches = family.nearest(pp, microbatches)
    if family.searched:
        options["effort"] = QUICK
    if family.takes("virtual_stages"):
        options["virtual_stages"] = virtual_stages
    return build(name, pp=pp, microbatches=microbatches, **options)
