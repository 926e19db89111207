"""A schedule of any family near any sizes, built quickly: the search itself is not tested."""

import orders
from orders import nearest_sizes

from jaxpipe.schedules import BUILDERS, FAMILIES, build

QUICK = 20_000  # steps that a search simulates; the default is many times as many
SEARCHED = [name for name in BUILDERS if FAMILIES[name].is_searched]


def near(name, pp, microbatches, virtual_stages=None, **options):
    """Return the schedule of the legal sizes nearest to the given ones."""
    if name not in SEARCHED:
        return orders.near(name, pp, microbatches, virtual_stages, **options)
    pp, microbatches = nearest_sizes(name, pp, microbatches)
    return build(name, pp=pp, microbatches=microbatches, effort=QUICK, **options)
